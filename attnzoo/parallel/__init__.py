"""One sequence over several ranks: fragments of it, and what layers and forms send each other about them."""

from attnzoo.parallel.context import context_parallel
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.prefill import prefill

__all__ = ["Fragments", "context_parallel", "prefill"]
