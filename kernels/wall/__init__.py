"""Wall attention: a decay per channel inside the logits, on PaTH's kernels over a tree of carried operands."""

from .api import triton_unavailable, wall_attention

__all__ = ["triton_unavailable", "wall_attention"]
