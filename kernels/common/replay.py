"""Runs that repeat: what an op allocated and launched, done again without the code that decided on it.

A run of an op depends on the shapes, strides, dtypes and alignment of its tensors and on its numbers. The second run of
a kind is recorded: tensors that it made, kernels that it launched, what their arguments were. From then on the same is
done on other tensors. Runs that read numbers, or take memory that they neither were given nor made, stay as they are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from attnzoo.kernels.common import direct, memory, tiles
from attnzoo.kernels.common.device import float32_products
from attnzoo.kernels.common.direct import Repeated
from attnzoo.kernels.common.recording import recorders

MOST = 256  # kinds of runs of an op that are remembered
_FIRST_DEVICE = 0  # that runs are replayed on: no CPU
_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # what they return says the device
_current_device = getattr(torch._C, "_cuda_getDevice", int)  # torch for CPUs has none
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_deterministic = torch._C._get_deterministic_algorithms
_shape_and_dtype = attrgetter("shape", "dtype")
_logger = logging.getLogger("attnzoo.kernels.replay")
BATCHED = (
    "kernels take one gradient at a time: for several at once (is_grads_batched=True, jacobian(vectorize=True)) "
    "expected impl='reference', or a loop"
)


class _Made(NamedTuple):
    """A tensor that a run makes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool


class _Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        run, grid, begin: its launcher, called with grid, stream, ``begin`` and the kernel's arguments.
        args: those of the kernel, as they were.
        pointers: (which argument, which tensor, bytes from its start) of each tensor among them.
        descriptors: the same of each descriptor.
    """

    run: Callable[..., Any]
    grid: tuple[int, ...]
    begin: tuple[Any, ...]
    args: list[Any]
    pointers: list[tuple[int, int, int]]
    descriptors: list[tuple[int, int, int]]


class _View(NamedTuple):
    """A tensor, by its number, or a part of it; inputs are counted first, then what a run makes."""

    of: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    whole: bool


class _Call(NamedTuple):
    """A call of torch's that computes.

    Attributes:
        given: its arguments, one by one; ``form`` makes (arguments, those by name) of them.
        makes: (which of what it returns, which number) of tensors that are new.
    """

    function: Callable[..., Any]
    given: list[Any]
    form: TreeSpec
    makes: list[tuple[int, int]]


def _taken(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The leaves at these places."""
    begin = places[0] if places else 0
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(begin, begin + len(places)))


@lru_cache(16 * MOST)
def _parted(kinds: tuple[type, ...]) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Any, ...]]]:
    """Of a tuple of leaves of these types, the tensors, and all others."""
    which = [[i for i, kind in enumerate(kinds) if issubclass(kind, Tensor) is are] for are in (True, False)]
    return _taken(which[0]), _taken(which[1])


class Replay:
    """A function of an op's leaves (inputs one by one), replayed where it can be.

    Args:
        run: returns the leaves of the outputs.
        proven: how many outputs, the first ones, a first replay in spoiled memory must give as the run gave them, to be
            believed; for runs whose code is not this package's. Of the others it may leave numbers unwritten, not all.
    """

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]], proven: int = 0) -> None:
        self._run, self._proven = run, proven
        self._known: dict[tuple[Any, ...], _Recording | str] = {}  # or why it is run

    def __call__(self, leaves: Sequence[Any], whole: bool = False) -> Sequence[Any]:
        """The leaves of the outputs; ``whole`` lets replays give a vector without elements, like the first input, for
        one that is not there."""
        if recorders.compiles:
            return self._run(leaves)
        which, rest = _parted(tuple(map(type, leaves)))
        given = tuple(leaves)
        tensors = which(given)
        where = tensors[0].get_device()
        device = _current_device() if where >= _FIRST_DEVICE else where  # torch for GPUs raises where there is none
        try:
            pointers = [*map(Tensor.data_ptr, tensors)]
        except RuntimeError as error:
            raise NotImplementedError(BATCHED) from error
        aligned = reduce(or_, pointers) % 16 == 0 or tuple([pointer % 16 == 0 for pointer in pointers])
        kinds = (*map(_shape_and_dtype, tensors), *map(Tensor.stride, tensors))
        key = (which, rest(given), kinds, aligned, tiles.changes(), float32_products(), device, where)
        known = self._known.get(key)
        if type(known) is _Recording:
            if not recorders.watched() and not _deterministic():
                made = known(tensors, pointers, device)
                if whole:
                    for i in known.absent:
                        made[i] = known.empty((0,), (1,), tensors[0].dtype)
                return made
        elif not known:
            return self._meet(key, known is None, leaves, tensors, pointers)
        return self._run(leaves)

    def _meet(
        self, key: tuple[Any, ...], new: bool, leaves: Sequence[Any], tensors: Sequence[Tensor], pointers: list[int]
    ) -> Sequence[Any]:  # fmt: skip
        """A run of a kind that was never met, or met once: that is recorded."""
        if new:
            if len(self._known) >= MOST:
                self._known.clear()
            devices = {x.get_device() for x in tensors}
            usual = min(devices) >= _FIRST_DEVICE and devices == {_current_device()}
            self._known[key] = "" if usual else "tensors are not on the current GPU"
            return self._run(leaves)
        if _deterministic():  # new memory is filled
            return self._run(leaves)
        if self._proven and torch.cuda.is_current_stream_capturing():
            return self._run(leaves)
        if len(set(pointers)) < len(pointers):  # which is which could not be told
            return self._run(leaves)
        recorder = _Recorder(tensors)
        with recorder, recorders.listening(recorder):
            outputs = self._run(leaves)
        recording = recorder.recording(outputs)
        if self._proven and isinstance(recording, _Recording):
            try:
                again = recording(tensors, [*pointers], key[-2], spoiled=True)
                pairs = [*zip(outputs, again, strict=True)]
                if not all(_same(a, b, n >= self._proven) for n, (a, b) in enumerate(pairs)):
                    recording = "a replay gives other numbers"
            except torch.OutOfMemoryError:
                recording = "no memory is left for a replay beside the run"
        if isinstance(recording, str):
            _logger.debug("a run is not replayed: %s", recording)
        self._known[key] = recording
        return outputs


class _Recorder(TorchDispatchMode):
    """Writes down what a run does."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.why = ""
        self._inputs = len(tensors)
        self._device = tensors[0].device
        self._ranges = [*map(_range, tensors)]
        self._whole = {n: (x.shape, x.stride(), x.dtype) for n, x in enumerate(tensors)}
        self._made: dict[int, _Made] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._steps: list[Any] = []  # launches, calls, and numbers of tensors: where they are made, and where they end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_for_ends()
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        computes = func not in _EMPTY and func not in _ZEROS
        if computes and _UNKNOWN & set(func.tags):
            self.why = self.why or str(func)
        flat, form = tree_flatten((args, kwargs))
        given = [self._view(x) if isinstance(x, Tensor) and x.numel() else x for x in flat] if computes else []
        before = {x.data_ptr() for x in flat if isinstance(x, Tensor)}
        made = func(*args, **kwargs)
        found = made if isinstance(made, tuple | list) else (made,)
        new = [
            (i, x) for i, x in enumerate(found) if isinstance(x, Tensor) and x.numel() and x.data_ptr() not in before
        ]
        numbers = [(i, self._note(x, func in _ZEROS)) for i, x in new]
        if computes:
            self._steps.append(_Call(func, given, form, numbers))
        elif numbers:
            self._steps.append(numbers[0][1])
        return made

    def _note(self, x: Tensor, zeros: bool) -> int:
        """The number of a tensor that was made."""
        number = len(self._ranges)
        self._ranges.append(_range(x))
        self._whole[number] = x.shape, x.stride(), x.dtype
        self._made[number] = _Made((*x.shape,), x.stride(), x.dtype, zeros)
        self._alive[number] = StorageWeakRef(x.untyped_storage())
        return number

    def launched(self, run: Callable[..., Any], grid: tuple[int, ...], begin: tuple[Any, ...], args: list[Any]) -> None:
        """A launch of a kernel, with all of its arguments."""
        self._look_for_ends()
        pointers: list[tuple[int, int, int]] = []
        descriptors: list[tuple[int, int, int]] = []
        for i, x in enumerate(args):
            described = hasattr(x, "looked_up_by")
            if described or (isinstance(x, Tensor) and x.numel()):
                place = self._place((x.base if described else x).data_ptr())
                (descriptors if described else pointers).append((i, *place))
        plain = [0 if isinstance(x, Tensor) else direct.placeless(x) if hasattr(x, "looked_up_by") else x for x in args]
        self._steps.append(_Launch(run, grid, begin, plain, pointers, descriptors))

    def _look_for_ends(self) -> None:
        for number in [n for n, storage in self._alive.items() if storage.expired()]:
            del self._alive[number]
            self._steps.append(-number)

    def _place(self, pointer: int) -> tuple[int, int]:
        """Which tensor holds an address, and how far from its start: the last one made, else an input."""
        holding = [n for n, (start, stop) in enumerate(self._ranges) if start <= pointer < stop]
        made = [n for n in holding if n >= self._inputs]
        exact = [n for n in holding if self._ranges[n][0] == pointer]
        for found in (made[-1:], exact, holding):
            if len(found) == 1:
                return found[0], pointer - self._ranges[found[0]][0]
        self.why = self.why or "an argument of a kernel is neither an input nor made"
        return 0, 0

    def recording(self, outputs: Sequence[Any]) -> _Recording | str:
        """The recording of the run, or the reason why it cannot be replayed."""
        returned = [None if x is None else self._view(x) for x in outputs]
        if any(x is not None and x.of < self._inputs for x in returned):
            self.why = self.why or "an output is an input"
        if not any(isinstance(step, _Launch) for step in self._steps):
            self.why = self.why or "no kernel was launched"
        return self.why or _Recording(self._inputs, self._device, self._made, self._steps, returned)

    def _view(self, x: Tensor) -> _View:
        """The view by which a tensor comes from a numbered one."""
        number, offset = self._place(x.data_ptr())
        size, stride, dtype = self._whole.get(number, ((), (), None))
        if dtype != x.dtype or offset % x.element_size():
            self.why = self.why or "a view has another dtype"
        whole = offset == 0 and (x.shape, x.stride()) == (size, stride)
        return _View(number, x.shape, x.stride(), offset // x.element_size(), whole)


class _Recording:
    """The launches and allocations of a run, repeated by a call with its inputs' addresses; it holds no tensor."""

    def __init__(
        self, inputs: int, device: torch.device, made: dict[int, _Made], steps: list[Any],
        returned: Sequence[_View | None],
    ) -> None:  # fmt: skip
        self.empty = memory.allocator(device)
        calls = [step for step in steps if isinstance(step, _Call)]
        kept = {view.of for view in returned if view is not None}
        apart = kept | {n for call in calls for _, n in call.makes}
        apart |= {x.of for call in calls for x in call.given if isinstance(x, _View)}
        shared: dict[int, tuple[bool, int]] = {}  # zeros or not, and bytes from the start
        sizes = {False: 0, True: 0}
        events: list[int] = []
        for step in steps:
            events += [step] if isinstance(step, int) else [n for _, n in getattr(step, "makes", ())]
        bytes_of = {number: memory.occupied(*x[:3]) for number, x in made.items()}
        for number in memory.joined([n for n in made if n not in apart], bytes_of, events):
            zeros = made[number].zeros
            shared[number], sizes[zeros] = (zeros, sizes[zeros]), sizes[zeros] + bytes_of[number]
        self._steps: list[Any] = [_Made((n // 4,), (1,), torch.float32, zeros) for zeros, n in sizes.items() if n]
        of_zeros = {False: inputs, True: inputs + (sizes[False] > 0)}
        places = {number: (of_zeros[zeros], offset) for number, (zeros, offset) in shared.items()}
        places |= {number: (number, 0) for number in range(inputs)}
        count = inputs + len(self._steps)
        for step in steps:
            if isinstance(step, _Launch):
                pointers, descriptors = (
                    [(i, places[n][0], places[n][1] + offset) for i, n, offset in some]
                    for some in (step.pointers, step.descriptors)
                )
                self._steps.append(direct.repeat(*step[:4], pointers, descriptors))
            elif isinstance(step, _Call):
                for _, number in step.makes:
                    places[number], count = (count, 0), count + 1
                given = [x._replace(of=places[x.of][0]) if isinstance(x, _View) else x for x in step.given]
                self._steps.append(step._replace(given=given))
            elif step > 0 and step not in shared:
                places[step], count = (count, 0), count + 1
                self._steps.append(made[step])
            elif step < 0 and -step not in shared and -step not in kept:
                self._steps.append(places[-step][0])
        self.absent = [i for i, x in enumerate(returned) if x is None]
        self._returned = [x if x is None else x._replace(of=places[x.of][0]) for x in returned]
        self._lock = threading.Lock()  # the lists of arguments are filled in place

    def __call__(
        self, inputs: Sequence[Tensor], pointers: list[int], device: int, spoiled: bool = False
    ) -> list[Tensor | None]:  # fmt: skip
        """The outputs' leaves; ``pointers`` are those of the inputs, to which those of what is made are added.

        Args:
            spoiled: fill new memory with bytes that are NaN.
        """
        tensors: list[Any] = [*inputs]
        stream = _stream(device)
        with self._lock:
            for step in self._steps:
                kind = type(step)
                if kind is Repeated:
                    launch, given, args, places, descriptors, _ = step
                    for i, number, offset in places:
                        args[i] = pointers[number] + offset
                    if descriptors:
                        step.describe(pointers)
                    given[direct.STREAM] = stream
                    launch(*given)
                elif kind is _Made:
                    size, stride, dtype, zeros = step
                    x = self.empty(size, stride, dtype)
                    if spoiled:
                        x.untyped_storage().fill_(255)  # type: ignore[attr-defined]
                    tensors.append(x.zero_() if zeros else x)
                    pointers.append(x.data_ptr())
                elif kind is _Call:
                    values = [_seen(tensors, x) if type(x) is _View else x for x in step.given]
                    positional, named = tree_unflatten(values, step.form)
                    made = step.function(*positional, **named)
                    for i, _ in step.makes:
                        tensors.append(made[i] if isinstance(made, tuple | list) else made)
                        pointers.append(tensors[-1].data_ptr())
                else:
                    tensors[step] = None
        return [x if x is None else tensors[x.of] if x.whole else _seen(tensors, x) for x in self._returned]


def _same(a: Tensor | None, b: Tensor | None, partly: bool) -> bool:
    """Whether b holds the numbers of a; with ``partly``, where b is no NaN, which it must be somewhere."""
    if a is None or b is None:
        return a is b
    if not partly or not b.numel():
        return torch.equal(a, b)
    unwritten = b.isnan()
    return not bool(unwritten.all()) and torch.equal(a.masked_fill(unwritten, 0), b.masked_fill(unwritten, 0))


def _seen(tensors: Sequence[Any], view: _View) -> Tensor:
    """The tensor among these, or the part of one, that a view names."""
    x: Tensor = tensors[view.of]
    return x if view.whole else x.as_strided(view.size, view.stride, x.storage_offset() + view.offset)


def _range(x: Tensor) -> tuple[int, int]:
    """The addresses at which a tensor's bytes begin and end; an empty range for an empty tensor."""
    n = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + n * x.element_size()
