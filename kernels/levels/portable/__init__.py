"""Portable kernels of attention over levels."""
