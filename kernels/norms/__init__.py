"""Norms of heads: of queries and keys, and of outputs with what is added and multiplied beside them."""

from .api import head_norm, triton_unavailable, unit_vectors
from .parts import Gated, Skip

__all__ = ["Gated", "Skip", "head_norm", "triton_unavailable", "unit_vectors"]
