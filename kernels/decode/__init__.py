"""Steps of softmax attention over keys that lie in pages: a table of pages per sequence and key head."""

from attnzoo.kernels.common.options import AttentionOptions

from .api import crop_unavailable, paged_append, paged_attention, paged_crop, paged_workspace, triton_unavailable
from .parts import Forget, Shift, TokenParts
from .path_pages import paged_path_carry, paged_path_step, path_unavailable
from .path_state import OpenGroup, PathGroups, PathTokens
from .state import GateState, KeyPages, PagedState, PageTable
from .step import paged_step

__all__ = [
    "AttentionOptions", "Forget", "GateState", "KeyPages", "OpenGroup", "PageTable", "PagedState",
    "PathGroups", "PathTokens", "Shift", "TokenParts", "crop_unavailable", "paged_append", "paged_attention",
    "paged_crop", "paged_path_carry", "paged_path_step", "paged_step", "paged_workspace", "path_unavailable",
    "triton_unavailable",
]  # fmt: skip
