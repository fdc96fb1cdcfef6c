"""Forgetting attention (FoX), ALiBi and NoPE from one kernel family, with certified pruning."""

from .api import fox_attention, kept_fraction, triton_unavailable

__all__ = ["fox_attention", "kept_fraction", "triton_unavailable"]
