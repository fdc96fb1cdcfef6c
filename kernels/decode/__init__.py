"""Steps of softmax attention over keys that lie in pages: a table of pages per sequence and key head."""

from .api import paged_append, paged_attention, paged_workspace, triton_unavailable
from .parts import Forget, Shift
from .path_pages import paged_path_carry, paged_path_step, path_unavailable
from .step import paged_step

__all__ = [
    "Forget", "Shift", "paged_append", "paged_attention", "paged_path_carry", "paged_path_step",
    "paged_step", "paged_workspace", "path_unavailable", "triton_unavailable",
]  # fmt: skip
