"""PaTH and PaTH-FoX: softmax attention through accumulated Householder-like products, with certified pruning."""

from .api import kept_fraction, path_attention, triton_unavailable
from .decode import carry_keys, path_extend, path_step, refuse_gradients

__all__ = [
    "carry_keys",
    "kept_fraction",
    "path_attention",
    "path_extend",
    "path_step",
    "refuse_gradients",
    "triton_unavailable",
]
