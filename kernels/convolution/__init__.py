"""The causal short convolution of each channel, with its bias and activation."""

from .api import causal_convolution, triton_unavailable

__all__ = ["causal_convolution", "triton_unavailable"]
