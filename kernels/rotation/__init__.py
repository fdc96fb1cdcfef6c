"""Rotations of queries, keys and the vectors of a transition, by phases that are sums of angles over all tokens."""

from .api import Turned, rotate, triton_unavailable

__all__ = ["Turned", "rotate", "triton_unavailable"]
