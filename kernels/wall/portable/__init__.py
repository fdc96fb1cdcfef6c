"""Kernels of the channels' decays, for every GPU."""
