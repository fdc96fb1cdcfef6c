"""Linear recurrences: a fused kernel over few tokens for any gate, and kernels of chunks for a scalar decay."""

from .api import MOST_TOKENS, linear_steps, triton_unavailable
from .chunk_api import chunks_unavailable, linear_chunks
from .gates import decays_unavailable, log_decays, writing_unavailable, written_values
from .parts import Convolution, DecayLogits, RecurrentParts
from .step import linear_step

__all__ = [
    "MOST_TOKENS", "Convolution", "DecayLogits", "RecurrentParts", "chunks_unavailable", "decays_unavailable",
    "linear_chunks", "linear_step", "linear_steps", "log_decays", "triton_unavailable", "writing_unavailable",
    "written_values",
]  # fmt: skip
