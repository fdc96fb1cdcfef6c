"""Shared parts of the kernel families: checks, gate sums, pruning, tiles, and pieces of kernels."""
