"""The recorder of the launches of kernels, and whether kernels are only compiled: each thread has its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Recorders(threading.local):
    """Attributes:
    current: is told of the launches of this thread.
    compiles: whether they compile kernels and do no more.
    hooks: Triton's settings, once a kernel is there.
    """

    current: Any = None
    compiles: bool = False
    hooks: Any = None

    @contextlib.contextmanager
    def listening(self, recorder: Any) -> Iterator[None]:
        """A context in which ``recorder`` is told."""
        before, self.current = self.current, recorder
        try:
            yield
        finally:
            self.current = before

    def watched(self) -> bool:
        """Whether somebody asked Triton to be told of launches, as its profiler does: Triton launches then."""
        hook = None if self.hooks is None else self.hooks.launch_enter_hook
        return hook is not None and bool(getattr(hook, "calls", True))


recorders = _Recorders()
