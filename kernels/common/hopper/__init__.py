"""Shared parts of the kernel families on Hopper, in Gluon."""
