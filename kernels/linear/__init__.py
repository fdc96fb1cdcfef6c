"""Linear recurrences over few tokens: one fused kernel for any gate, which is what generating needs."""

from .api import MOST_TOKENS, linear_steps, triton_unavailable

__all__ = ["MOST_TOKENS", "linear_steps", "triton_unavailable"]
