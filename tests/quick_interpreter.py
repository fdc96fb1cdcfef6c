"""Triton's interpreter without the work that it repeats or throws away: the same numbers in half the time.

Per launch and per call of a device function it reads the members of the whole language anew, to replace what is
replaced already; it computes every integer operation a second time in 64 bits for a check that `debug` switches off;
it makes a table of all types to look up one; for every value it makes the type and the shape anew and checks its size,
and for every number a value; it compares types of operands that are one object; at each operation, load and product it
finds anew what the types of its operands say of the result, and at each cast how its two types convert; and it scans
element by element.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """Replace these parts in `triton.runtime.interpreter`, where they are as expected; else leave it as it is."""
    from triton.runtime import interpreter

    needed = (
        "_patch_lang", "_patch_attr", "_LangPatchScope", "_get_np_dtype", "interpreter_builder", "interpreter_semantic",
        "tl", "TritonSemantic", "ScanOps",
    )  # fmt: skip
    if not all(hasattr(interpreter, name) for name in needed):
        return
    tl, builder = interpreter.tl, interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    plain_dtype = interpreter._get_np_dtype
    known_dtype = functools.cache(plain_dtype)
    interpreter._get_np_dtype = lambda dtype: (known_dtype if type(dtype) is tl.dtype else plain_dtype)(dtype)

    interpreter.TensorHandle.__post_init__ = lambda self: None
    spread_truths(interpreter)
    call_at_once(interpreter)
    keep_numbers(tl.core, interpreter.TritonSemantic)
    scan_at_once(interpreter)
    keep_types(tl.core)
    cast_at_once(interpreter)
    skip_what_agrees(tl.core, interpreter.TritonSemantic)
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    patched: dict[int, dict[str, Any]] = {}  # the globals of modules, kept so that their ids stay taken

    def patch_once(fn: Any) -> Any:
        """For good: nothing but the interpreter runs the language here."""
        names = fn.__globals__
        if id(names) not in patched:
            patch(fn)
            patched[id(names)] = names
        return nothing

    interpreter._patch_lang = patch_once


def call_at_once(interpreter: Any) -> None:
    """Functions of the language get what they need beside their arguments without the check that it is there."""
    language = interpreter.tl
    checked = language.core.builtin(lambda: None).__code__
    semantic = interpreter.interpreter_semantic
    operation = functools.cache(functools.partial(as_before, interpreter))
    function = functools.cache(functools.partial(as_first, interpreter))
    store = functools.cache(functools.partial(store_as_it_is, interpreter))

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        run = member.__wrapped__ if getattr(member, "__code__", None) is checked else member
        if not builder.options.debug and obj is language.tensor and name in OPERATIONS:
            return scope.set_attr(obj, name, operation(*OPERATIONS[name], run))
        if not builder.options.debug and obj in (language, language.core) and name in FUNCTIONS:
            return scope.set_attr(obj, name, function(name, run))
        if not builder.options.debug and obj in (language, language.core) and name == "store":
            return scope.set_attr(obj, name, store(run))

        def at_once(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return run(*args, **kwargs)

        scope.set_attr(obj, name, at_once)

    interpreter._patch_attr = patch


ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
OTHERS = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
    "and": "bitwise_and", "or": "bitwise_or", "mod": "fmod", "floordiv": "truncated",
}  # fmt: skip
OPERATIONS = {
    **{f"__{name}__": (function, False) for name, function in (ARITHMETIC | OTHERS).items()},
    **{f"__r{name}__": (function, True) for name, function in ARITHMETIC.items()},
    "__getitem__": ("", False),
}


def as_before(interpreter: Any, function: str, swapped: bool, plain: Any) -> Any:
    """``plain``, an operation of two values, as numpy's ``function`` of what they hold, without a look at their types:
    where that gave the bits of ``plain`` when operands of these types came for the first time. Without a name it is an
    index of axes."""
    numpy, of_handle, core = interpreter.np, interpreter.TensorHandle, interpreter.tl.core
    tensor, constexpr, pointer, new = core.tensor, core.constexpr, core.pointer_type, object.__new__
    semantic, known = interpreter.interpreter_semantic, dict[Any, Any]()
    own = {"": operator.getitem, "truncated": lambda a, b: (a - numpy.fmod(a, b)) // b}
    compute = own.get(function) or getattr(numpy, function)

    def learn(x: Any, y: Any, b: Any, result: Any) -> Any:
        """What a result's tensor has, and the function of ``numpy``; None where the result is not the function's."""
        a, expected, run, scalar = x.handle.data, result.handle, compute, x.type.scalar
        if type(scalar) is pointer:
            size = max(1, scalar.element_ty.primitive_bitwidth // 8)
            run = lambda place, offset: place + size * offset.astype(numpy.uint64)  # noqa: E731
            if function != "add" or type(y) is not tensor or not y.dtype.is_int_signed():
                return None
        with numpy.errstate(all="ignore"):
            found = run(b, a) if swapped else run(a, b)
        same = (type(found), found.dtype, found.shape) == (type(e := expected.data), e.dtype, e.shape)
        kept = x.handle.dtype == expected.dtype and (a.dtype != bool or x.type.is_block() == result.type.is_block())
        return (run, vars(result.type)["of_tensors"]) if same and kept and found.tobytes() == e.tobytes() else None

    def run(x: Any, y: Any, _semantic: Any = semantic) -> Any:
        if type(y) is constexpr:
            y = y.value
        handle, kind = x.handle, type(y)
        a = handle.data
        if kind is tensor:
            b = y.handle.data
            key = id(x.type), id(y.type), a.dtype.char, b.dtype.char, a.ndim, b.ndim
        elif (a.dtype.kind == "f" and kind in (float, int)) or (a.dtype.char in "il" and kind is int):
            b, key = a.dtype.type(y), (id(x.type), kind, a.dtype.char, a.ndim)
        elif kind is tuple and all(part is None or part == slice(None) for part in y):
            b, key = y, (id(x.type), a.dtype.char, a.ndim, *(part is None for part in y))
        else:
            return plain(x, y, _semantic=_semantic)
        quick = known.get(key)
        if quick is None:
            result = plain(x, y, _semantic=_semantic)
            if key not in known:
                known[key] = learn(x, y, b, result)
                of.append((x.type, kind is tensor and y.type))
            return result
        compute, fields = quick
        made, value = new(of_handle), new(tensor)
        made.data, made.dtype, made.attr = compute(b, a) if swapped else compute(a, b), handle.dtype, {}
        value.handle = made
        vars(value).update(fields)
        return value

    of: list[Any] = []  # the types, so that their ids stay taken
    return run


FUNCTIONS = {  # the arguments that are values, or numbers in their place
    "load": ("pointer", "mask", "other"), "where": ("condition", "x", "y"), "dot": ("input", "other", "acc"),
    "maximum": ("x", "y"), "minimum": ("x", "y"), "exp2": ("x",), "trans": ("input",),
}  # fmt: skip
ANYHOW = {"input_precision"}  # what changes nothing here


def as_first(interpreter: Any, name: str, plain: Any) -> Any:
    """``plain``, a function of values, as numpy computes it from what they hold: where that gave the bits of ``plain``
    when values of these types came for the first time."""
    numpy, memory, of_handle = interpreter.np, interpreter._interpreter, interpreter.TensorHandle
    core, semantic, new, names = interpreter.tl.core, interpreter.interpreter_semantic, object.__new__, FUNCTIONS[name]
    tensor, constexpr, array = core.tensor, core.constexpr, numpy.ndarray
    function = getattr(numpy, {"trans": "transpose"}.get(name, name))

    def load(dtype: Any, place: Any, mask: Any = None, other: Any = None) -> Any:
        shown = numpy.ones(place.shape, bool) if mask is None else numpy.broadcast_to(mask, place.shape)
        if type(other) is array:
            filled = numpy.broadcast_to(other, place.shape).astype(dtype)
        else:
            filled = numpy.full(place.shape, other, dtype) if other else numpy.zeros(place.shape, dtype)
        return memory.load(place, shown, filled, dtype)

    def dot(dtype: Any, a: Any, b: Any, acc: Any = None) -> Any:
        return numpy.matmul(a, b, dtype=dtype) + (dtype.type(0) if acc is None else acc)

    def of_numpy(dtype: Any, *given: Any) -> Any:
        return function(*[x if type(x) is array else dtype.type(x) for x in given])

    compute = {"load": load, "dot": dot}.get(name, of_numpy)

    def learn(given: tuple[Any, ...], held: list[Any], result: Any) -> Any:
        """The type and what a tensor of it has; None where the result is not numpy's."""
        kinds = [x.type.scalar for x in given if type(x) is tensor]
        if not {getattr(kind, "element_ty", kind).name for kind in kinds} <= {*NUMBERS, "int1"}:
            return None
        expected = result.handle
        try:
            with numpy.errstate(all="ignore"):
                found = compute(expected.data.dtype, *held)
        except (ArithmeticError, RuntimeError, TypeError, ValueError):  # what only the interpreter makes one
            return None
        same = (found.dtype, found.shape) == (expected.data.dtype, expected.data.shape)
        fields = vars(result.type).get("of_tensors")
        same = same and fields is not None and found.tobytes() == expected.data.tobytes()
        return (found.dtype, expected.dtype, fields) if same else None

    def run(*given: Any, **options: Any) -> Any:
        for wanted in names[len(given) :]:
            given += (options.pop(wanted, None),)
        key, held = [], []
        for x in given:
            if type(x) is constexpr:
                x = x.value
            if type(x) is tensor:
                x, kind = x.handle.data, id(x.type)
            else:
                kind = x if x is None else type(x)
            key.append(kind)
            held.append(x)
        options.pop("_semantic", None)
        signature, simple = tuple(key), len(given) == len(names) and options.keys() <= ANYHOW
        found = known.get(signature) if simple else None
        if found is None:
            result = plain(*given, _semantic=semantic, **options)
            if simple and signature not in known:
                known[signature] = learn(given, held, result)
                of.append([x.type for x in given if type(x) is tensor])
            return result
        dtype, element, fields = found
        made, value = new(of_handle), new(tensor)
        made.data, made.dtype, made.attr = compute(dtype, *held), element, {}
        value.handle = made
        vars(value).update(fields)
        return value

    known: dict[Any, Any] = {}
    of: list[Any] = []  # the types, so that their ids stay taken
    return run


def store_as_it_is(interpreter: Any, plain: Any) -> Any:
    """``plain``, which stores values: at once where they have the type and the shape of what is there."""
    numpy, memory, semantic = interpreter.np, interpreter._interpreter, interpreter.interpreter_semantic
    tensor, of_pointers = interpreter.tl.core.tensor, interpreter.tl.core.pointer_type

    def run(pointer: Any, value: Any, mask: Any = None, *more: Any, **options: Any) -> Any:
        options.pop("_semantic", None)
        there, masked = pointer.type.scalar, type(mask) is tensor
        simple = type(there) is of_pointers and type(value) is tensor and (masked or mask is None)
        if simple and not more and not options and there.element_ty.name == value.type.scalar.name in NUMBERS:
            place, held = pointer.handle.data, value.handle.data
            shown = mask.handle.data if masked else numpy.ones(place.shape, bool)
            if place.shape == held.shape == shown.shape:
                return memory.store(place, held, shown)
        return plain(pointer, value, mask, *more, _semantic=semantic, **options)

    return run


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


def scan_at_once(interpreter: Any) -> None:
    """A scan joins whole blocks, with themselves from one, two, four, ... places before, as GPUs do."""
    numpy = interpreter.np

    def scan(self: Any, values: Any) -> Any:
        shape, step = values[0].handle.data.shape, 1
        place = numpy.arange(shape[self.axis]).reshape([-1 if d == self.axis else 1 for d in range(len(shape))])
        while step < shape[self.axis]:
            before = [self.to_tensor(numpy.roll(x.handle.data, step, self.axis), x.dtype) for x in values]
            with numpy.errstate(all="ignore"):  # of the first places, which keep what they have
                joined = self.combine_fn.fn(*before, *values)
            values = [
                self.to_tensor(numpy.where(place < step, x.handle.data, y.handle.data), x.dtype)
                for x, y in zip(values, joined if isinstance(joined, tuple) else (joined,), strict=True)
            ]
            step *= 2
        return values

    interpreter.ScanOps.generic_scan = scan


def keep_types(core: Any) -> None:
    """One object per type of blocks, which has the shape of its tensors, in ``triton.language.core``."""
    block_type, pointer_type, tensor, constexpr = core.block_type, core.pointer_type, core.tensor, core.constexpr
    plain_block, plain_pointer, plain_tensor = block_type.__init__, pointer_type.__init__, tensor.__init__
    known: dict[Any, Any] = {}
    pointers: dict[Any, Any] = {}
    whole = set[int]()  # ids of `pointers`

    def make_pointer(cls: type, element_ty: Any = None, address_space: int = 1, const: bool = False) -> Any:
        if type(element_ty) is not core.dtype or address_space != 1:
            return object.__new__(cls)
        key = (element_ty.name, const)
        if key not in pointers:
            pointers[key] = object.__new__(cls)
            plain_pointer(pointers[key], element_ty, address_space, const)
            whole.add(id(pointers[key]))
        return pointers[key]

    def start_pointer(self: Any, *given: Any, **named: Any) -> None:
        if not vars(self):
            plain_pointer(self, *given, **named)

    def make_block(cls: type, element_ty: Any = None, shape: Any = ()) -> Any:
        if type(element_ty) is not core.dtype and id(element_ty) not in whole:
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

    pointer_type.__new__, pointer_type.__init__ = make_pointer, start_pointer
    block_type.__new__, block_type.__init__ = make_block, start_block
    tensor.__init__ = start_tensor


def keep_numbers(core: Any, semantic: type) -> None:
    """One value per number and type, and a value is itself."""
    plain_tensor, plain_constant, tensor = semantic.to_tensor, semantic.scalar_constant, core.tensor
    known: dict[Any, Any] = {}

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else plain_tensor(self, x, check_type)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype and dtype.name)
        if key not in known:
            known[key] = plain_constant(self, value, dtype)
        return known[key]

    semantic.to_tensor, semantic.scalar_constant = to_tensor, constant


NUMBERS = {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {
    "fp16": "float16", "fp32": "float32", "fp64": "float64",
}  # fmt: skip


def cast_at_once(interpreter: Any) -> None:
    """A cast between types that numpy has is numpy's, without a look at how else they might convert."""
    semantic, core, of_handle = interpreter.TritonSemantic, interpreter.tl.core, interpreter.TensorHandle
    plain = semantic.cast

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.type.scalar, dst_ty.scalar
        if type(source) is not core.dtype or type(target) is not core.dtype or fp_downcast_rounding is not None:
            return plain(self, input, dst_ty, fp_downcast_rounding)
        if source.name == target.name:
            return input
        if target.name not in NUMBERS or (source.name not in NUMBERS and source.name != "int1"):
            return plain(self, input, dst_ty)
        made = of_handle(input.handle.data.astype(NUMBERS[target.name]), target)
        return core.tensor(made, input.type.with_element_ty(target) if input.type.is_block() else target)

    semantic.cast = cast


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
