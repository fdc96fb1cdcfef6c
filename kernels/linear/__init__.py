"""Linear recurrences over few tokens: one fused kernel for any gate, which is what generating needs."""

from .api import MOST_TOKENS, linear_steps, triton_unavailable
from .gates import decays_unavailable, log_decays, writing_unavailable, written_values
from .parts import Convolution, DecayLogits, RecurrentParts
from .step import linear_step

__all__ = [
    "MOST_TOKENS", "Convolution", "DecayLogits", "RecurrentParts", "decays_unavailable", "linear_step", "linear_steps",
    "log_decays", "triton_unavailable", "writing_unavailable", "written_values",
]  # fmt: skip
