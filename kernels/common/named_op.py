"""Custom ops of torch that take one named tuple and return one: fakes, autograd and callers read the same fields.

A field that is a named tuple itself is handed on field by field. Fields keep their names; the second of a name gets
that of its tuple as a prefix. An op of torch returns no None, so an output that is not there leaves it as a vector
without elements, which is None again for who reads outputs by name; the same holds for inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import NoneType
from typing import Any, Generic, TypeVar, cast, get_args, get_type_hints

import torch
from torch import Tensor

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
Outputs = TypeVar("Outputs", bound=tuple[Any, ...])


def traced(x: Tensor) -> bool:
    """Whether a compiler or a tensor of another kind must see an op; without, its function is called as it is."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


class NamedOp(Generic[Inputs, Outputs]):
    """One custom op, called with the named tuple of its inputs.

    Args:
        name: of torch's op, ``"attnzoo::..."``.
        inputs, outputs: named tuple types; outputs hold tensors, or None where they are annotated so.
        run: computes the outputs.
        fake: outputs of the same shapes, dtypes and devices, without reading any values.
        changes: leaves of the inputs that ``run`` writes to.
    """

    def __init__(
        self, name: str, inputs: type[Inputs], outputs: type[Outputs], run: Callable[[Inputs], Outputs],
        fake: Callable[[Inputs], Outputs], changes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.run, self.inputs, self.outputs = run, _Fields(inputs), _Fields(outputs)
        definition = torch.library.custom_op(name, self._flat(run), mutates_args=changes)
        definition.register_fake(self._flat(fake))
        self._definition, self.op = definition, definition._opoverload

    def __call__(self, given: Inputs) -> Outputs:
        """The outputs by way of torch's dispatcher, which autograd and compilers see."""
        made = self.op(*self.inputs.leaves(given))
        return cast(Outputs, self.outputs.read((made,) if self.outputs.single else made))

    def without_gradient(self, given: Inputs, x: Tensor) -> Outputs:
        """The outputs, past the dispatcher where neither a compiler nor a kind of tensor (that of x) must see the op.

        The way through it takes longer than all else that an op of one token does on the host.
        """
        return self(given) if traced(x) else self.run(given)

    def differentiable(
        self, backward: Callable[[Inputs, Outputs, Outputs, frozenset[str]], Mapping[str, Any]], *,
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

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            made = (output,) if outs.single else output
            ctx.save_for_backward(*(inputs[i] for i in of_inputs), *(made[i] for i in of_outputs))
            ctx.given = [None if isinstance(x, Tensor) else x for x in inputs]
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, *grads: Tensor | None) -> Any:
            given, made = list(ctx.given), [None] * len(outs.names)
            for leaves, places, tensors in (
                (given, of_inputs, ctx.saved_tensors), (made, of_outputs, ctx.saved_tensors[len(of_inputs) :])
            ):  # fmt: skip
                for i, x in zip(places, tensors, strict=False):
                    leaves[i] = x
            wanted = frozenset(name for name, x in zip(ins.names, ctx.needs_input_grad, strict=True) if x)
            found = backward(ins.read(given), outs.read(made), outs.read(grads), wanted)
            return tuple(found.get(name) for name in ins.names)

        self._definition.register_autograd(differentiate, setup_context=save)

    def refuse_second_derivatives(self) -> None:
        """Let the op, which computes gradients, say that these have no gradients themselves."""

        def backward(ctx: Any, *grads: Tensor | None) -> None:
            raise RuntimeError(
                "the kernels have first derivatives only: a gradient of a gradient (create_graph=True) expects "
                "impl='reference' of the kernels' functions, or attnzoo.oracle"
            )

        self._definition.register_autograd(backward)

    def _flat(self, function: Callable[[Inputs], Outputs]) -> Callable[..., Any]:
        """``function`` of the leaves one by one, with the signature that torch reads the op's schema from."""

        def call(*leaves: Any) -> Any:
            made = self.outputs.leaves(function(self.inputs.read(leaves)))
            if self.outputs.single:
                return made[0]
            like = next(x for x in (*made, *leaves) if x is not None)
            return tuple(like.new_empty(0) if x is None else x for x in made)

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
        nested: per field its own leaves, None where it is one leaf, and whether it may be None.
        single: whether there is one leaf alone.
    """

    def __init__(self, of: type[Any]) -> None:
        self.of, self.types = of, dict[str, Any]()
        self.nested: list[tuple[_Fields | None, bool]] = []
        for name, annotation in get_type_hints(of).items():
            kinds = get_args(annotation) or (annotation,)
            tuples = [t for t in kinds if hasattr(t, "_fields")]
            inner, optional = _Fields(tuples[0]) if tuples else None, NoneType in kinds
            self.nested.append((inner, optional))
            for leaf, kind in {name: annotation}.items() if inner is None else inner.types.items():
                leaf = f"{name}_{leaf}" if leaf in self.types else leaf
                self.types[leaf] = kind | None if optional else kind
        self.names, self.single = tuple(self.types), len(self.types) == 1
        self.empty = [NoneType in get_args(t) for t in self.types.values()]
        self.flat = all(inner is None for inner, _ in self.nested)

    def places(self, names: Sequence[str]) -> list[int]:
        """Where the leaves of these names are."""
        for name in names:
            if name not in self.types:
                raise ValueError(f"saved: expected names among {self.names}, got {name!r}")
        return [self.names.index(name) for name in names]

    def leaves(self, value: Any) -> list[Any]:
        """The leaves of a named tuple, or as many None."""
        if value is None:
            return [None] * len(self.names)
        if self.flat:
            return [*value]
        found: list[Any] = []
        for x, (inner, _) in zip(value, self.nested, strict=True):
            found += [x] if inner is None else inner.leaves(x)
        return found

    def read(self, leaves: Sequence[Any]) -> Any:
        """The named tuple of leaves, with None for vectors without elements, and for optional tuples without leaves."""
        return self._built(iter([
            None if empty and isinstance(x, Tensor) and x.ndim == 1 and x.shape[0] == 0 else x
            for x, empty in zip(leaves, self.empty, strict=True)
        ]))  # fmt: skip

    def _built(self, leaves: Iterator[Any]) -> Any:
        if self.flat:
            return self.of(*islice(leaves, len(self.names)))
        fields: list[Any] = []
        for inner, optional in self.nested:
            if inner is None:
                fields.append(next(leaves))
            elif optional:
                own = [*islice(leaves, len(inner.names))]
                fields.append(None if all(x is None for x in own) else inner._built(iter(own)))
            else:
                fields.append(inner._built(leaves))
        return self.of(*fields)
