"""Attention over levels on Hopper, in Gluon."""
