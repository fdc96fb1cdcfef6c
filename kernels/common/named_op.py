"""Custom ops of torch that take one named tuple and return one: fakes, autograd and callers read the same fields.

A field that is a named tuple itself is handed on field by field. Fields keep their names; the second of a name gets
that of its tuple as a prefix. An op of torch returns no None, so an output that is not there leaves it as a vector
without elements, which is None again for who reads outputs by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, Generic, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor
from torch._C import _functorch
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from attnzoo.algebra.values import OPAQUE
from attnzoo.kernels.common.replay import Replay
from attnzoo.kernels.common.together import Passes, compile_together

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
Outputs = TypeVar("Outputs", bound=tuple[Any, ...])


_PLAIN = frozenset((Tensor, Parameter, NoneType, bool, int, float, str, torch.dtype))


def traced(x: Tensor) -> bool:
    """Whether a compiler or a tensor of another kind must see an op; without, its function is called as it is."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


def dispatched(leaves: Sequence[Any]) -> bool:
    """Whether anything beside autograd must see an op: a compiler, a mode, a transform, a tensor of another kind, a
    profiler, which names it."""
    first = leaves[0]
    return (
        torch.compiler.is_compiling()
        or (isinstance(first, Tensor) and first.is_meta)
        or not _PLAIN.issuperset(map(type, leaves))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or profiler._is_profiler_enabled
    )


def recorded(leaves: Sequence[Any]) -> bool:
    """Whether autograd records an op of these."""
    if torch.is_grad_enabled():
        for x in leaves:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def _differentiates_forward(leaves: Sequence[Any]) -> bool:
    """Whether a forward derivative of any of these is asked for."""
    if _functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x, level=0).tangent is not None for x in leaves)


def refuse(ctx: Any, *grads: Tensor | None) -> None:
    """The backward pass of a function that computes gradients by kernels.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "the kernels have first derivatives only: a gradient of a gradient (create_graph=True) expects "
        "impl='reference' of the kernels' functions, or attnzoo.oracle"
    )


class _Called:
    """What torch's op is in Python: a way to the dispatcher, and past it where nothing beside autograd must see the op
    and no gradient is recorded."""

    def __init__(self, dispatch: Callable[..., Any], run: Callable[..., Any], whole: Callable[..., Any]) -> None:
        self._dispatch, self._run, self._whole = dispatch, run, whole

    def __call__(self, *leaves: Any, **named: Any) -> Any:
        if named or dispatched(leaves) or recorded(leaves):
            return self._dispatch(*leaves, **named)
        return self._whole(self._run(leaves, True), leaves[0])

    def __hash__(self) -> int:  # that of torch's op, by which it was found before
        return hash(self._dispatch)


class NamedOp(Generic[Inputs, Outputs]):
    """One custom op, called with the named tuple of its inputs.

    Args:
        name: of torch's op, ``"attnzoo::..."``.
        inputs, outputs: named tuple types; outputs hold tensors, or None where they are annotated so.
        run: computes the outputs.
        fake: outputs of the same shapes, dtypes and devices, without reading any values.
        changes: leaves of the inputs that ``run`` writes to.
        replays: whether ``run`` depends on nothing but its inputs, and so may be replayed (``replay.py``).
        together: whether the kernels of a first call that records a gradient are compiled with those of the gradient;
            no value that a kernel computes may decide what is launched.
        captured: whether compilers may capture it in a CUDA graph; else it runs between two of them.
    """

    def __init__(
        self, name: str, inputs: type[Inputs], outputs: type[Outputs], run: Callable[[Inputs], Outputs],
        fake: Callable[[Inputs], Outputs], changes: Sequence[str] = (), replays: bool = False, together: bool = False,
        captured: bool = True,
    ) -> None:  # fmt: skip
        self._together, self._compiled = together, set[tuple[Any, ...]]()
        self.run, self.inputs, self.outputs = run, _Fields(inputs), _Fields(outputs)
        self._changes = bool(changes)
        self._recorded: Any = None  # the run as autograd sees it

        def leaves_of(function: Callable[[Inputs], Outputs]) -> Callable[..., Sequence[Any]]:
            return lambda leaves, whole=False: self.outputs.leaves(function(self.inputs.built(leaves)))

        self._run = Replay(leaves_of(run)) if replays else leaves_of(run)
        unsafe = None if captured else getattr(torch.Tag, "cudagraph_unsafe", None)  # older releases have none
        tags: dict[str, Any] = {} if unsafe is None else {"tags": (unsafe,)}
        definition = torch.library.custom_op(name, self._flat(self._run), mutates_args=changes, **tags)
        definition.register_fake(self._flat(leaves_of(fake)))
        self._definition, self.op = definition, definition._opoverload
        if not changes:
            self._intercept()

    def __call__(self, given: Inputs) -> Outputs:
        """The outputs, by way of torch's dispatcher where anything beside autograd must see the op.

        The dispatcher takes longer on the host than all else that an op does there.
        """
        leaves = self.inputs.leaves(given)
        if not self._changes and not dispatched(leaves):
            if not recorded(leaves):
                return cast(Outputs, self.outputs.built(self._run(leaves)))
            if self._recorded is not None:
                return cast(Outputs, self.outputs.built(self._recorded.apply(*leaves)))
        made = self.op(*leaves)
        return cast(Outputs, self.outputs.read((made,) if self.outputs.single else made))

    def _intercept(self) -> None:
        """Refuse forward derivatives, which torch's own way takes for 0 where no gradient is recorded, and let calls
        from compiled code, which record none, run the function as calls from Python do.

        torch's own way goes through the dispatcher once more and looks at all storages, which takes the host about as
        long as a replay; from compiled code in Python the first way through it is left out, too.
        """
        usual, whole, run = make_autograd_impl(self.op, self._definition), self._whole, self._run

        def seen(keys: Any, *leaves: Any) -> Any:
            if dispatched(leaves):
                if _differentiates_forward(leaves):
                    raise NotImplementedError(OPAQUE)  # which ends a compiled graph: what follows runs as it is
            elif not recorded(leaves):
                return whole(run(leaves, True), leaves[0])
            return usual(keys, *leaves)

        namespace, name = self.op._schema.name.split("::")
        self._library = torch.library.Library(namespace, "IMPL")  # what it registers goes with it
        for device in ("CPU", "CUDA"):
            self._library.impl(name, seen, f"Autograd{device}", with_keyset=True)
        if hasattr(self.op, "_op"):
            self.op._op = _Called(self.op._op, run, whole)

    def without_gradient(self, given: Inputs, x: Tensor) -> Outputs:
        """The outputs, past the dispatcher where neither a compiler nor a kind of tensor (that of x) sees the op."""
        return self(given) if traced(x) else self.run(given)

    def differentiable(
        self, backward: Callable[[Inputs, Outputs, Outputs, set[str]], Mapping[str, Any]], *,
        inputs: Sequence[str], outputs: Sequence[str],
    ) -> None:  # fmt: skip
        """Give the op a gradient.

        Args:
            backward: of the inputs and outputs (None for tensors that are not saved), the gradients of the outputs
                (None for 0) and the names of the inputs whose gradient is asked for, the gradients by these names.
            inputs, outputs: leaves that are saved for it; inputs that are no tensors it has anyhow.
        """
        ins, outs = self.inputs, self.outputs
        of_inputs, of_outputs = ins.places(inputs), outs.places(outputs)

        def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            made = (output,) if isinstance(output, Tensor) else output
            ctx.save_for_backward(*[inputs[i] for i in of_inputs], *[made[i] for i in of_outputs])
            ctx.given = [None if isinstance(x, Tensor) else x for x in inputs]
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, *grads: Tensor | None) -> Any:
            given, made, saved = [*ctx.given], [None] * len(outs.names), ctx.saved_tensors
            for i, x in zip(of_inputs, saved, strict=False):
                given[i] = x
            for i, x in zip(of_outputs, saved[len(of_inputs) :], strict=True):
                made[i] = x
            wanted = {name for name, x in zip(ins.names, ctx.needs_input_grad, strict=True) if x}
            found = backward(ins.built(given), outs.read(made), outs.read(grads), wanted)
            return tuple(map(found.get, ins.names))

        def compile_both(leaves: Sequence[Any]) -> None:
            ctx: Any = Passes()
            ctx.needs_input_grad = [isinstance(x, Tensor) for x in leaves]
            made = self._run(leaves)
            save(ctx, leaves, made)
            differentiate(ctx, *(None if x is None else torch.empty_like(x) for x in made))

        def forward(ctx: Any, *leaves: Any) -> tuple[Tensor | None, ...]:
            if self._together:
                kind = tuple([x.dtype if isinstance(x, Tensor) else x for x in leaves])
                if kind not in self._compiled:
                    self._compiled.add(kind)
                    compile_together(partial(compile_both, leaves))
            made = self._run(leaves)
            save(ctx, leaves, made)
            return tuple(made)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        self._recorded = type(self.op._schema.name.split("::")[1], (torch.autograd.Function,), methods)
        self._definition.register_autograd(differentiate, setup_context=save)

    def refuse_second_derivatives(self) -> None:
        """Let the op, which computes gradients, say that these have no gradients themselves."""

        self._definition.register_autograd(refuse)

    def _whole(self, outputs: Sequence[Any], like: Tensor) -> Any:
        """What torch's op returns for these leaves, with vectors without elements for those that are not there."""
        made = [*outputs]
        for i, x in enumerate(made):
            if x is None:
                made[i] = like.new_empty(0)
        return made[0] if self.outputs.single else tuple(made)

    def _flat(self, function: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[..., Any]:
        """``function`` of the leaves one by one, with the signature that torch reads the op's schema from."""

        def call(*leaves: Any) -> Any:
            return self._whole(function(leaves), leaves[0])

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind, annotation=t) for name, t in self.inputs.types.items()]
        n = len(self.outputs.names)
        returned = Tensor if n == 1 else tuple[(Tensor,) * n]  # type: ignore[misc]
        call.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        return call


class _Fields:
    """The leaves of a named tuple type, whose fields may be named tuples (or None) themselves.

    Attributes:
        types: annotations of the leaves by name.
        single: whether there is one leaf alone.
        leaves: the list of the leaves of a named tuple.
        built: the named tuple of a list of leaves, with None for an optional tuple without any leaf.
    """

    leaves: Callable[[Any], list[Any]]
    built: Callable[[Sequence[Any]], Any]

    def __init__(self, of: type[Any]) -> None:
        self.types: dict[str, Any] = {}
        kinds: dict[str, type[Any]] = {}
        taken, built = self._read(of, "x", kinds)
        # written out, as namedtuple does it: loops over fields would take longer than the op's own way
        self.leaves, self.built = (eval(f"lambda x: {source}", kinds) for source in (f"[{taken}]", built))
        self.names, self.single = tuple(self.types), len(self.types) == 1
        self._optional = [i for i, t in enumerate(self.types.values()) if {Tensor, NoneType} <= {*get_args(t)}]

    def _read(self, of: type[Any], at: str, kinds: dict[str, type[Any]], optional: bool = False) -> tuple[str, str]:
        """Sources of the leaves of ``at``, and of a named tuple of leaves x from the next one on; adds the leaves."""
        taken, built, needed = [], [], []
        for name, annotation in get_type_hints(of).items():
            options = get_args(annotation) or (annotation,)
            tuples = [t for t in options if hasattr(t, "_fields")]
            here, begin = f"{at}.{name}", len(self.types)
            if tuples:
                inner, made = self._read(tuples[0], here, kinds, optional or NoneType in options)
                absent = f"(None,) * {len(self.types) - begin} if {here} is None else"
                taken.append(f"*({absent} ({inner},))" if NoneType in options else inner)
                built.append(made)
            else:
                leaf = f"{'_'.join(at.split('.')[1:])}_{name}" if name in self.types else name
                self.types[leaf] = annotation | None if optional else annotation
                taken.append(here)
                built.append(f"x[{begin}]")
                needed += [] if NoneType in options else [f"x[{begin}] is None"]
        kinds[of.__name__] = of
        made = f"{of.__name__}({', '.join(built)})"
        return ", ".join(taken), f"(None if {needed[0]} else {made})" if optional and needed else made

    def places(self, names: Sequence[str]) -> list[int]:
        """The places of the leaves of these names among all leaves."""
        for name in names:
            if name not in self.types:
                raise ValueError(f"saved: expected names among {self.names}, got {name!r}")
        return [self.names.index(name) for name in names]

    def read(self, outputs: Sequence[Any]) -> Any:
        """The named tuple of an op's outputs, or their gradients, with None for vectors without elements."""
        found = [*outputs]
        for i in self._optional:
            x = found[i]
            if x is not None and x.ndim == 1 and not x.shape[0]:
                found[i] = None
        return self.built(found)
