"""Rotations of queries, keys and the vectors of a transition, by phases that are sums of angles over all tokens."""

from .api import rotate, triton_unavailable

__all__ = ["rotate", "triton_unavailable"]
