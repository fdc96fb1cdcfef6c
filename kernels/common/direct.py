"""Launches that are repeated without Triton's launcher in Python: what it hands to its launcher in C is kept.

Triton's launcher takes memory that a kernel asks for, encodes each descriptor, and calls its launcher in C. Of what
that is given, only the stream, addresses and encoded descriptors differ from one repetition to the next, and an encoded
descriptor follows from its address. What it is given is found by Triton's own code with a stand-in for the launcher in
C: nothing here knows how a release encodes. A launcher that may do anything else is called itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

MOST = 1024  # encoded descriptors that are kept, of one argument of a launch
STREAM = 3  # its place, after the grid, for launchers in Python and in C
_SIZES = {"global_scratch_size", "profile_scratch_size"}  # of memory that a launcher takes
_KNOWN = _SIZES | {
    "arg_annotations", "global_scratch_align", "gsan_enabled", "kernel_signature", "launch", "launch_cooperative_grid",
    "launch_pdl", "num_ctas", "profile_scratch_align",
}  # fmt: skip
_logger = logging.getLogger("attnzoo.kernels.replay")


class Address:
    """A stand-in for a tensor of which only the address is asked."""

    def __init__(self, pointer: int = 0) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


def placeless(described: Any) -> Any:
    """A descriptor like another one, of what begins where its ``base.pointer`` says."""
    made = object.__new__(type(described))
    vars(made).update(vars(described))
    made.base = Address(described.base.data_ptr())
    return made


class Repeated(NamedTuple):
    """A call of a launcher, whose arguments a replay fills in place.

    Attributes:
        run: the launcher, Triton's in C where that is known to suffice.
        given: its arguments.
        args: the kernel's among them: ``given`` itself, or the last one.
        pointers: (place in ``args``, which tensor, bytes from its start) of each tensor.
        descriptors: (base, which tensor, bytes from its start, place in ``args``, what is there by address).
        encode: the kernel's arguments for the addresses of the bases, or None where the launcher encodes.
    """

    run: Callable[..., Any]
    given: list[Any]
    args: list[Any]
    pointers: list[tuple[int, int, int]]
    descriptors: list[tuple[Address, int, int, int, dict[int, Any]]]
    encode: Callable[[], Sequence[Any]] | None

    def describe(self, pointers: Sequence[int]) -> None:
        """Fill in the descriptors of tensors at these addresses."""
        missing = False
        for base, number, offset, i, known in self.descriptors:
            base.pointer = pointer = pointers[number] + offset
            if self.encode is not None:
                self.args[i] = found = known.get(pointer)
                missing |= found is None
        if missing and self.encode is not None:
            made = self.encode()
            for base, _, _, i, known in self.descriptors:
                if len(known) >= MOST:
                    known.clear()
                self.args[i] = known[base.pointer] = made[i]


def repeat(
    run: Callable[..., Any], grid: tuple[int, ...], begin: tuple[Any, ...], args: Sequence[Any],
    pointers: list[tuple[int, int, int]], descriptors: list[tuple[int, int, int]],
) -> Repeated:  # fmt: skip
    """A launch that calls ``run`` with grid, stream, ``begin`` and args, or does what that would do.

    Args:
        args: the kernel's, with :func:`placeless` descriptors.
        pointers, descriptors: (which argument, which tensor, bytes from its start).
    """
    try:
        return _in_c(run, grid, begin, args, pointers, descriptors)
    except Exception as why:  # whatever a release does in another way
        _logger.debug("a launch is repeated by Triton: %s", why)
    given, first = [*grid, 0, *begin, *args], len(grid) + 1 + len(begin)
    places = [(first + i, number, offset) for i, number, offset in pointers]
    return Repeated(run, given, given, places, [(args[i].base, n, offset, 0, {}) for i, n, offset in descriptors], None)


def _in_c(
    run: Any, grid: tuple[int, ...], begin: tuple[Any, ...], args: Sequence[Any],
    pointers: list[tuple[int, int, int]], descriptors: list[tuple[int, int, int]],
) -> Repeated:  # fmt: skip
    """The launch by Triton's launcher in C alone.

    Raises:
        ValueError: Triton's launcher in Python does more than encode, or what it hands on is not understood.
    """
    kind = type(run)
    if (kind.__module__, kind.__name__) != ("triton.backends.nvidia.driver", "CudaLauncher"):
        raise ValueError("the launcher is not Triton's for NVIDIA")
    own = vars(run)
    if not {"launch", "global_scratch_size"} <= own.keys() <= _KNOWN:
        raise ValueError(f"the launcher has other attributes: {sorted(own)}")
    if own.get("gsan_enabled") or any(own.get(name) for name in _SIZES):
        raise ValueError("the launcher takes memory, or checks memory")
    stand_in: list[Any] = [object() if any(i == at for at, _, _ in pointers) else x for i, x in enumerate(args)]
    stream = object()
    in_c, hand_on = _handed_on(run)

    def hand() -> tuple[Any, ...]:
        given = hand_on(*grid, stream, *begin, *stand_in)
        if len(given) <= STREAM or given[STREAM] is not stream:
            raise ValueError("the stream is not the fourth argument of the launcher in C")
        return given

    given = [*hand()]
    nested = not any(x is stand_in[i] for i, _, _ in pointers for x in given)

    def encode() -> Sequence[Any]:
        made = hand()
        return made[-1] if nested else made

    filled = given
    if nested:
        given[-1] = filled = [*given[-1]]
    again = encode()
    if len(filled) != len(again):
        raise ValueError("the number of arguments varies")
    encoded = iter([i for i, (a, b) in enumerate(zip(filled, again, strict=True)) if a is not b])
    places = [(_only(stand_in[i], filled), number, offset) for i, number, offset in pointers]
    bases = []
    for i, number, offset in sorted(descriptors):
        base = args[i].base
        if any(x is base for x in filled):  # its parts are handed on one by one
            places.append((_only(base, filled), number, offset))
        else:
            bases.append((base, number, offset, next(encoded, -1), dict[int, Any]()))
    if any(place < 0 for *_, place, _ in bases) or next(encoded, None) is not None:
        raise ValueError("not one argument is encoded for each descriptor")
    return Repeated(in_c, given, filled, places, bases, encode)


def _handed_on(run: Any) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """Triton's launcher in C, and a function that returns what it would be given in place of launching."""
    caught: list[tuple[Any, ...]] = []

    def catch(*given: Any) -> None:
        caught.append(given)

    double = object.__new__(type(run))
    vars(double).update(vars(run))
    double.launch, in_c, wrapped = catch, run.launch, run.launch
    if isinstance(wrapped, FunctionType):  # around the launcher in C, which is among what it closes over
        cells = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True))
        if "launcher" not in cells:
            raise ValueError("no launcher in C is found")
        in_c = cells["launcher"].cell_contents
        cells["launcher"] = CellType(catch)
        double.launch = FunctionType(
            wrapped.__code__, wrapped.__globals__, wrapped.__name__, wrapped.__defaults__, tuple(cells.values())
        )

    def hand_on(*given: Any) -> tuple[Any, ...]:
        caught.clear()
        double(*given)
        if len(caught) != 1:
            raise ValueError(f"the launcher in C is called {len(caught)} times")
        return caught.pop()

    return in_c, hand_on


def _only(x: Any, args: Sequence[Any]) -> int:
    """The one place of an argument."""
    places = [i for i, y in enumerate(args) if y is x]
    if len(places) != 1:
        raise ValueError(f"an argument is handed on {len(places)} times")
    return places[0]
