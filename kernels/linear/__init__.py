"""Linear recurrences over few tokens: one fused kernel for any gate, which is what generating needs."""

from .api import MOST_TOKENS, linear_steps, triton_unavailable
from .parts import Convolution, DecayLogits, RecurrentParts
from .step import linear_step

__all__ = [
    "MOST_TOKENS", "Convolution", "DecayLogits", "RecurrentParts", "linear_step", "linear_steps", "triton_unavailable",
]  # fmt: skip
