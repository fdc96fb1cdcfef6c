"""Training steps of flash-linear-attention's chunk operations without their Python code, once they repeat.

A step of theirs is eleven to fifteen launches, and the library and Triton spend 50 to 100 microseconds on each. Their
passes are functions of tensors, so they are recorded and replayed as the ops of this package are
(``kernels/common/replay.py``); a recording is believed where it gives what the run gave, in spoiled memory.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.forms.backends import fla_kernels
from attnzoo.kernels.common.device import triton_version
from attnzoo.kernels.common.named_op import dispatched, refuse
from attnzoo.kernels.common.recording import recorders
from attnzoo.kernels.common.replay import Replay
from attnzoo.kernels.common.together import Passes

Operation = Callable[..., tuple[Tensor, Tensor | None]]
FUNCTIONS = {  # the torch.autograd.Function of an operation
    "chunk_simple_gla": "ChunkSimpleGLAFunction", "chunk_gla": "ChunkGLAFunction", "chunk_kda": "ChunkKDAFunction",
    "chunk_delta_rule": "ChunkDeltaRuleFunction", "chunk_gated_delta_rule": "ChunkGatedDeltaRuleFunction",
}  # fmt: skip
MOST = 256  # kinds of calls of an operation that are remembered
NEUTRAL = {"state_v_first": False}  # arguments of their forward passes without a default; others are None


class _Kind:
    """Calls of one function with the same numbers, and tensors of the same shapes in the same places, where one tensor
    may stand in several.

    Args:
        function: their torch.autograd.Function.
        given: its arguments; tensors among them stand for those of each call.
    """

    def __init__(self, function: Any, given: Sequence[Any]) -> None:
        self._function = function
        self._numbers = [None if isinstance(x, Tensor) else x for x in given]
        self._tensors = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
        self._context: dict[str, Any] = {}
        self._sources: list[int] = []  # of each tensor that is saved, once: the number of an input, -1 for a new one
        self._order: list[int | None] = []  # of each that their pass saves, perhaps twice: its number among these
        self.forward, self.backward = Replay(self._forward, proven=2), Replay(self._backward, proven=len(self._tensors))

    def _forward(self, leaves: Sequence[Any]) -> list[Any]:
        """Output, last state, and what is saved beside inputs."""
        given, context = [*self._numbers], Passes()
        for i, x in zip(self._tensors, leaves, strict=True):
            given[i] = x
        with _told():
            made = self._function.forward(context, *given)
        once = {id(x): x for x in context.saved_tensors if x is not None}
        inputs, saved = [id(x) for x in leaves], [*once]
        self._sources = [inputs.index(one) if one in inputs else -1 for one in saved]
        self._order = [None if x is None else saved.index(id(x)) for x in context.saved_tensors]
        new = [x for x, source in zip(once.values(), self._sources, strict=True) if source < 0]
        self._context = {name: x for name, x in vars(context).items() if name != "saved_tensors"}
        return [*made, *new]

    @torch.no_grad()
    def compile(self, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Both passes where launches compile kernels and do no more; what they return says nothing."""
        o, state, *new = self._forward(leaves)
        self._backward((torch.empty_like(o), state, *self.saved(leaves, new)))
        return o, state

    def saved(self, leaves: Sequence[Tensor], new: Iterable[Tensor]) -> list[Tensor]:
        """What is saved, from the inputs and what the forward pass has made for it."""
        made = iter(new)
        return [next(made) if source < 0 else leaves[source] for source in self._sources]

    def _backward(self, leaves: Sequence[Any]) -> list[Any]:
        """Gradients of the inputs, for those of output and last state and what was saved."""
        context, saved = Passes(), leaves[2:]
        vars(context).update(self._context, saved_tensors=tuple([None if i is None else saved[i] for i in self._order]))
        with _told():
            found = self._function.backward(context, *leaves[:2])
        return [found[i] for i in self._tensors]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: _Kind, *leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        o, state, *new = kind.forward(leaves)
        ctx.kind = kind
        ctx.save_for_backward(*kind.saved(leaves, new))
        return o, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        leaves = *grads, *ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return None, *_Gradients.apply(ctx.kind, *leaves)  # type: ignore[no-untyped-call]
        return None, *ctx.kind.backward(leaves)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: _Kind, *leaves: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(kind.backward(leaves))

    backward = staticmethod(refuse)


def _told() -> contextlib.AbstractContextManager[object]:
    """A context in which the recorder, if there is one, is told of launches by Triton."""
    if recorders.current is None:
        return contextlib.nullcontext()
    from attnzoo.kernels.common.launched import in_place_of_launches, tell

    return in_place_of_launches(tell)


def repeating(family: str, name: str, operation: Operation, version: str) -> Operation:
    """An operation of flash-linear-attention, by keywords after q, k and v, whose training steps are replayed.

    Packed sequences are not, as their borders are read on the CPU, nor calls of releases that nobody has read, or where
    other packages' kernels may serve them, whose launches nobody hears of.
    """
    known = version.startswith("0.6.") and triton_version() >= (3, 4) and not fla_kernels.installed()
    if not known or os.environ.get("FLA_GLUON", "0") != "0" or name not in FUNCTIONS:
        return operation
    function = getattr(importlib.import_module(f"fla.ops.{family}.chunk"), FUNCTIONS[name])
    _, *parameters = inspect.signature(function.forward).parameters.values()
    defaults = {x.name: NEUTRAL.get(x.name) if x.default is x.empty else x.default for x in parameters}
    kinds: dict[tuple[Any, ...], _Kind] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        gates = [x for x in given.values() if isinstance(x, Tensor)]
        records = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *gates))
        if given["cu_seqlens"] is not None or not records or dispatched((q, k, v, *gates)):
            return operation(q, k, v, **given)
        scale = q.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
        leaves = [
            x.contiguous() if isinstance(x, Tensor) else x
            for x in {**defaults, "q": q, "k": k, "v": v, **given, "scale": scale}.values()
        ]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        same, device = [*map(id, tensors)], q.device.type
        key = (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device), *map(same.index, same),
            *[(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves],
        )  # fmt: skip
        kind = kinds.get(key)
        if kind is None:
            if len(kinds) >= MOST:
                kinds.clear()
            kind = kinds[key] = _Kind(function, leaves)
        if recorders.compiles:
            return kind.compile(tensors)
        o, state = _Step.apply(kind, *tensors)  # type: ignore[no-untyped-call]
        return o, state

    return run
