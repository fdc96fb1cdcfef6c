"""Triton's interpreter without the work that it repeats or throws away: the same numbers in half the time.

Per launch and per call of a device function it reads the members of the whole language anew, to replace what is
replaced already; it computes every integer operation a second time in 64 bits for a check that `debug` switches off;
it makes a table of all types to look up one; for every value it makes the type and the shape anew; and it compares
types of operands that are one object.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from inspect import getmembers, ismodule
from typing import Any


def quicken() -> None:
    """Replace these parts in `triton.runtime.interpreter`, where they are as expected; else leave it as it is."""
    from triton.runtime import interpreter

    needed = (
        "_patch_lang", "_patch_attr", "_LangPatchScope", "_get_np_dtype", "interpreter_builder", "interpreter_semantic",
        "tl", "TritonSemantic",
    )  # fmt: skip
    if not all(hasattr(interpreter, name) for name in needed):
        return
    tl, builder = interpreter.tl, interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    plain_dtype = interpreter._get_np_dtype
    known_dtype = functools.cache(plain_dtype)
    interpreter._get_np_dtype = lambda dtype: (known_dtype if type(dtype) is tl.dtype else plain_dtype)(dtype)

    spread_truths(interpreter)
    call_at_once(interpreter)
    keep_types(tl.core)
    skip_what_agrees(tl.core, interpreter.TritonSemantic)
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    first = {place: next(name for name, x in getmembers(place) if tl.core.is_builtin(x)) for place in places}

    known: dict[tuple[int, int], tuple[dict[str, Any], list[Any]]] = {}

    def places_of(names: dict[str, Any]) -> list[Any]:
        """What is replaced for the functions of a module, of which ``names`` are the globals."""
        key = (id(names), len(names))
        if key not in known:
            modules = [value for value in names.values() if ismodule(value)]
            own = [tl, tl.math] * (tl in modules) + [tl.core] * (tl.core in modules)
            known[key] = (names, [*own, tl.tensor, tl.core.tensor_descriptor_base])  # names: so that its id stays taken
        return known[key][1]

    def patch_once(fn: Any) -> Any:
        if any(tl.core.is_builtin(getattr(place, first[place])) for place in places_of(fn.__globals__)):
            return patch(fn)
        return nothing

    interpreter._patch_lang = patch_once


def call_at_once(interpreter: Any) -> None:
    """Functions of the language get what they need beside their arguments without the check that it is there."""
    checked = interpreter.tl.core.builtin(lambda: None).__code__
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        run = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def at_once(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return run(*args, **kwargs)

        scope.set_attr(obj, name, at_once)

    interpreter._patch_attr = patch


def spread_truths(interpreter: Any) -> None:
    """A comparison of scalars, spread over a block, stays one of truths: Triton 3.9 makes integers of them, and refuses
    these as masks."""
    builder, numpy, tl = type(interpreter.interpreter_builder), interpreter.np, interpreter.tl
    plain_splat = builder.create_splat

    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype != numpy.bool_:
            return plain_splat(self, ret_ty, arg)
        return interpreter.TensorHandle(numpy.full(ret_ty.shape, arg.data.flat[0]), tl.int1)

    builder.create_splat = splat


def keep_types(core: Any) -> None:
    """One object per type of blocks, which has the shape of its tensors, in ``triton.language.core``."""
    block_type, tensor, constexpr = core.block_type, core.tensor, core.constexpr
    plain_block, plain_tensor = block_type.__init__, tensor.__init__
    known: dict[Any, Any] = {}

    def make_block(cls: type, element_ty: Any = None, shape: Any = ()) -> Any:
        if type(element_ty) is not core.dtype:  # pointers have no hash
            return object.__new__(cls)
        key = (element_ty.name, *(x.value if type(x) is constexpr else x for x in shape))
        if key not in known:
            block = object.__new__(cls)
            plain_block(block, element_ty, shape)
            known[key] = block
        return known[key]

    def start_block(self: Any, element_ty: Any, shape: Any) -> None:
        if not vars(self):
            plain_block(self, element_ty, shape)

    def start_tensor(self: Any, handle: Any, type: Any) -> None:
        kept = vars(type).get("of_tensors")
        if kept is None:
            plain_tensor(self, handle, type)
            type.of_tensors = {name: vars(self)[name] for name in ("shape", "numel", "type", "dtype")}
            return
        self.handle = handle
        vars(self).update(kept)

    block_type.__new__, block_type.__init__ = make_block, start_block
    tensor.__init__ = start_tensor


def skip_what_agrees(core: Any, semantic: type) -> None:
    """Two values of one shape are not broadcast, two of one type are operands as they are, and a type is itself."""
    plain_equal, plain_shapes, plain_broadcast = core.dtype.__eq__, core.tuple.__eq__, semantic.broadcast_impl_value
    plain_operands = semantic.binary_op_type_checking_impl
    kept = {id(x) for x in (core.float32, core.float64, core.int32, core.int64)}  # by every operation

    def operands(self: Any, lhs: Any, rhs: Any, *allowed: Any, **more: Any) -> Any:
        if type(lhs) is type(rhs) is core.tensor and lhs.type is rhs.type and id(lhs.type.scalar) in kept:
            return lhs, rhs
        return plain_operands(self, lhs, rhs, *allowed, **more)

    def same_shape(self: Any, other: Any) -> Any:
        if type(other) is list and all(type(x) is int for x in other):
            return core.constexpr(self.values == other)
        return plain_shapes(self, other)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b or (type(a) is type(b) is core.block_type and a.shape.values == b.shape.values):
            return lhs, rhs
        return plain_broadcast(self, lhs, rhs)

    core.dtype.__eq__ = lambda self, other: self is other or plain_equal(self, other)
    core.tuple.__eq__, semantic.broadcast_impl_value = same_shape, broadcast
    semantic.binary_op_type_checking_impl = operands
