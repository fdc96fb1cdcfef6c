"""Forgetting attention (FoX), ALiBi and NoPE from one kernel family, with certified pruning."""

from attnzoo.kernels.common.running_gates import GateSums

from .api import fox_attention, kept_fraction, triton_unavailable

__all__ = ["GateSums", "fox_attention", "kept_fraction", "triton_unavailable"]
