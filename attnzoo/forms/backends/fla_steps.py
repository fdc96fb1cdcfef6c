"""flash-linear-attention's chunk operations as ops of torch, without their Python code once calls repeat.

A step of theirs is eleven to fifteen launches, and the library and Triton spend 50 to 100 microseconds on each. Their
passes are functions of tensors, so they are recorded and replayed as the ops of this package are
(``kernels/common/replay.py``); a recording is believed where it gives what the run gave, in spoiled memory. As ops they
are part of a compiled graph, which the library's own functions break.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.forms.backends import fla_kernels
from attnzoo.forms.backends.fla_tuning import all_tiles, shorten, will_run
from attnzoo.kernels.common.device import triton_version
from attnzoo.kernels.common.named_op import NamedOp, dispatched
from attnzoo.kernels.common.recording import recorders
from attnzoo.kernels.common.replay import Replay
from attnzoo.kernels.common.together import Passes, compile_together
from attnzoo.kernels.common.untraced import cached_in_traces

Some = Tensor | None
MOST = 256  # kinds of calls of an operation that are remembered
TENSORS = ("q", "k", "v", "g", "g_gamma", "beta", "initial_state")
NEUTRAL = {"state_v_first": False}  # arguments of their forward passes without a default; others are None


class FlaInputs(NamedTuple):
    """Arguments of an operation by the library's names, contiguous, gates in float32; ``autocast`` is its dtype where
    it is on."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Some
    g_gamma: Some
    beta: Some
    initial_state: Some
    scale: float
    output_final_state: bool
    autocast: torch.dtype | None


class FlaOutputs(NamedTuple):
    """Output, last state, and what the library saves for the gradient beside its arguments."""

    o: Tensor
    state: Some
    first: Some
    second: Some
    third: Some


class FlaBackward(NamedTuple):
    do: Tensor
    dstate: Some
    given: FlaInputs
    first: Some
    second: Some
    third: Some


class FlaGradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Some
    beta: Some
    initial_state: Some


class _Kind:
    """Calls of one function with the same numbers, and tensors of the same shapes.

    Args:
        function: their torch.autograd.Function.
        arguments: its arguments by name; tensors among them stand for those of each call.
    """

    def __init__(self, function: Any, arguments: dict[str, Any]) -> None:
        self._function = function
        self._numbers = [None if isinstance(x, Tensor) else x for x in arguments.values()]
        names = [*arguments]
        self._tensors = [names.index(x) for x in TENSORS if isinstance(arguments.get(x), Tensor)]
        self.names = [names[i] for i in self._tensors]
        self._context: dict[str, Any] | None = None
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
    def compile(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Both passes where launches compile kernels and do no more; what they return says nothing."""
        o, state, *new = self._forward(leaves)
        self._backward((torch.empty_like(o), state, *self.saved(leaves, new)))
        return [o, state, *new]

    def saved(self, leaves: Sequence[Tensor], new: Iterable[Tensor]) -> list[Tensor]:
        """What is saved, from the inputs and what the forward pass has made for it."""
        if self._context is None:  # the kind was forgotten since its forward pass
            self._forward(leaves)
        made = iter(new)
        return [next(made) if source < 0 else leaves[source] for source in self._sources]

    def _backward(self, leaves: Sequence[Any]) -> list[Any]:
        """Gradients of the inputs, for those of output and last state and what was saved."""
        context, saved = Passes(), leaves[2:]
        restored = tuple([None if i is None else saved[i] for i in self._order])
        vars(context).update(self._context or {}, saved_tensors=restored)
        with _told():
            found = self._function.backward(context, *leaves[:2])
        return [found[i] for i in self._tensors]


def _told() -> contextlib.AbstractContextManager[object]:
    """A context in which the recorder, if there is one, is told of launches by Triton."""
    if recorders.current is None:
        return contextlib.nullcontext()
    from attnzoo.kernels.common.launched import in_place_of_launches, tell

    return in_place_of_launches(tell)


class FlaOp:
    """An operation of flash-linear-attention of sequences that are not packed, as an op of torch.

    Compilers run it between CUDA graphs: PyTorch refused a graph that held it, as something kept 12 tensors of the
    graph's memory.

    Args:
        family, name, function: its module under ``fla.ops``, its name, and its torch.autograd.Function there.
        saves: of its arguments, tensors of the shapes and dtypes of what it saves beside them.
        summed: whether it saves the first of these, sums of its gates, in place of the gates.
    """

    def __init__(
        self, family: str, name: str, function: str, saves: Callable[[FlaInputs], tuple[Some, ...]],
        summed: bool = False,
    ) -> None:  # fmt: skip
        self._family, self._name, self._function = family, name, function
        self._saves, self._summed = saves, summed
        self.kinds: dict[tuple[Any, ...], _Kind] = {}
        self.op = NamedOp(f"attnzoo::fla_{name}", FlaInputs, FlaOutputs, self._forward, self._fake, captured=False)
        self.backward_op = NamedOp(
            f"attnzoo::fla_{name}_bwd", FlaBackward, FlaGradients, self._backward, self._backward_fake, captured=False
        )
        inputs = [x for x in TENSORS if not (summed and x == "g")]
        self.op.differentiable(self._differentiate, inputs=inputs, outputs=("first", "second", "third"))
        self.backward_op.refuse_second_derivatives()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Some]:
        """Output and last state, of the library's arguments."""
        made = self.op(self._inputs(q, k, v, given))
        return made.o, made.state

    def inferred(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Some]:
        """Output and last state where no gradient is recorded: by the library's own function the first time, as lengths
        of prompts seldom come again."""
        x = self._inputs(q, k, v, given)
        key, own = ("inferred", *_key(x)), recorders.compiles or dispatched(self.op.inputs.leaves(x))
        kind = None if own else self.kinds.get(key)
        if kind is None:
            if not own:
                self._remember(key, x)
            return self.library(x.q, x.k, x.v, **given)
        o, state, *_ = kind.forward(_apart(getattr(x, name) for name in kind.names))
        return o, state

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> FlaInputs:
        tensors = {"q": q, "k": k, "v": v, **given}
        contiguous = [None if (x := tensors.get(name)) is None else x.contiguous() for name in TENSORS]
        scale = q.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
        autocast, device = None, q.device.type
        if not torch.compiler.is_compiling() and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        return FlaInputs._make((*contiguous, scale, given["output_final_state"], autocast))

    @functools.cached_property
    def library(self) -> Callable[..., tuple[Tensor, Some]]:
        """The library's own function."""
        operation: Any = getattr(importlib.import_module(f"fla.ops.{self._family}"), self._name)
        shorten()
        return operation  # type: ignore[no-any-return]

    @functools.cached_property
    def _passes(self) -> tuple[Any, dict[str, Any]]:
        """The torch.autograd.Function, and the defaults of its forward pass by name."""
        function = getattr(importlib.import_module(f"fla.ops.{self._family}.chunk"), self._function)
        shorten()
        _, *parameters = inspect.signature(function.forward).parameters.values()
        return function, {x.name: NEUTRAL.get(x.name) if x.default is x.empty else x.default for x in parameters}

    def _kind(self, x: FlaInputs) -> tuple[_Kind, list[Tensor]]:
        """The kind of a call, and its tensors."""
        key = _key(x)
        kind = self.kinds.get(key)
        new = kind is None
        if kind is None:
            kind = self._remember(key, x)
        tensors = _apart(getattr(x, name) for name in kind.names)
        if new and x.q.is_cuda and not recorders.compiles and not all_tiles():
            will_run(described(x.q, x.v))
            compile_together(partial(kind.compile, tensors))
        return kind, tensors

    def _remember(self, key: tuple[Any, ...], x: FlaInputs) -> _Kind:
        """A new kind of calls."""
        if len(self.kinds) >= MOST:
            self.kinds.clear()
        function, defaults = self._passes
        given = x._asdict()
        kind = self.kinds[key] = _Kind(function, {name: given.get(name, defaults[name]) for name in defaults})
        return kind

    def _forward(self, x: FlaInputs) -> FlaOutputs:
        kind, tensors = self._kind(x)
        o, state, *new = kind.compile(tensors) if recorders.compiles else kind.forward(tensors)
        return FlaOutputs(o, state, *new, *[None] * (3 - len(new)))

    def _fake(self, x: FlaInputs) -> FlaOutputs:
        (B, _, H, K), V = x.q.shape, x.v.shape[3]
        state = x.q.new_empty((B, H, K, V), dtype=torch.float32) if x.output_final_state else None
        saved = [y for y in self._saves(x) if y is not None]
        return FlaOutputs(torch.empty_like(x.v), state, *saved, *[None] * (3 - len(saved)))

    def _differentiate(self, x: FlaInputs, made: FlaOutputs, grads: FlaOutputs, wanted: Any) -> dict[str, Some]:
        do = torch.zeros_like(x.v) if grads.o is None else grads.o
        return self.backward_op(FlaBackward(do, grads.state, x, *made[2:]))._asdict()

    def _kept(self, x: FlaBackward) -> FlaInputs:
        """The arguments as they were saved."""
        return x.given._replace(g=x.first) if self._summed else x.given

    def _backward(self, x: FlaBackward) -> FlaGradients:
        kind, tensors = self._kind(self._kept(x))
        saved = kind.saved(tensors, [y for y in (x.first, x.second, x.third) if y is not None])
        found = dict(zip(kind.names, kind.backward((x.do, x.dstate, *saved)), strict=True))
        return FlaGradients._make(map(found.get, FlaGradients._fields))

    def _backward_fake(self, x: FlaBackward) -> FlaGradients:
        given = self._kept(x)
        tensors = [getattr(given, name) for name in FlaGradients._fields]
        return FlaGradients._make(None if y is None else torch.empty_like(y) for y in tensors)


def _key(x: FlaInputs) -> tuple[Any, ...]:
    return tuple([(one.shape, one.dtype) if isinstance(one, Tensor) else one for one in x])


def _apart(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, each an object of its own, by which a recording tells which is which."""
    found = [*tensors]
    return found if len({*map(id, found)}) == len(found) else [x.view_as(x) for x in found]


def described(q: Tensor, v: Tensor) -> str:
    """Heads and dtype, for the log of a tuning."""
    return f"H={q.shape[2]}, K={q.shape[3]}, V={v.shape[3]}, {str(q.dtype).removeprefix('torch.')}"


def _sums(x: FlaInputs) -> Some:
    """Sums of gates within chunks."""
    return None if x.g is None else torch.empty_like(x.g)


def _pairs(x: FlaInputs, dtype: torch.dtype | None = None, chunk: int = 64) -> Tensor:
    """Numbers of pairs of tokens within chunks."""
    return x.q.new_empty((*x.q.shape[:3], chunk), dtype=dtype)


def _of_decay(x: FlaInputs) -> tuple[Some, ...]:
    return _sums(x), None if x.g_gamma is None else torch.empty_like(x.g_gamma)


def _of_diagonal(x: FlaInputs) -> tuple[Some, ...]:
    T = x.q.shape[1]
    return _sums(x), _pairs(x, torch.float32, 64 if T > 32 else 32 if T > 16 else 16)


OPERATIONS = {
    name: FlaOp(family, name, function, saves, summed=name == "chunk_gla")
    for family, name, function, saves in (
        ("simple_gla", "chunk_simple_gla", "ChunkSimpleGLAFunction", _of_decay),
        ("gla", "chunk_gla", "ChunkGLAFunction", _of_diagonal),
        ("kda", "chunk_kda", "ChunkKDAFunction", lambda x: (_sums(x), _pairs(x), _pairs(x))),
        ("delta_rule", "chunk_delta_rule", "ChunkDeltaRuleFunction", lambda x: (_pairs(x),)),
        ("gated_delta_rule", "chunk_gated_delta_rule", "ChunkGatedDeltaRuleFunction", lambda x: (_sums(x), _pairs(x))),
    )
}


@cached_in_traces
def known(version: str) -> bool:
    """Whether a release has been read, and launches no other packages' kernels, of which nobody hears."""
    return been_read(version) and not unheard()


def been_read(version: str) -> bool:
    """Whether the passes of a release are known, and Triton tells what they launch."""
    return version.startswith("0.6.") and triton_version() >= (3, 4)


def unheard() -> dict[str, str]:
    """What makes the library launch kernels of which nobody hears -> what keeps it from doing so."""
    found = {name: f"{fla_kernels.SWITCHES[name]}=0 switches it off" for name in fla_kernels.in_use()}
    gluon = os.environ.get("FLA_GLUON", "0")
    return found if gluon == "0" else found | {f"FLA_GLUON={gluon}": "unset it"}
