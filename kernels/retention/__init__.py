"""How many keys rows still hold where retention says what they forget, and what it learns (One-Pass Forgetting)."""

from attnzoo.kernels.common.retention import Retention, Rule

from .api import held_keys, key_divergence, triton_unavailable
from .lesson import Lesson

__all__ = ["Lesson", "Retention", "Rule", "held_keys", "key_divergence", "triton_unavailable"]
