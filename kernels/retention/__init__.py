"""How many keys rows still hold where retention says what they forget (One-Pass Forgetting)."""

from attnzoo.kernels.common.retention import Retention, Rule

from .api import held_keys, triton_unavailable

__all__ = ["Retention", "Rule", "held_keys", "triton_unavailable"]
