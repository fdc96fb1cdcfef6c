"""Odd and bad values for the arguments of forms and kernels from a seeded generator, and the right answer."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnzoo import Gate, Prune, oracle

# what a message may begin with: the argument that is wrong
NAMED = re.compile(
    r"(gate(\.\w+|_sums)?|state(\.\w+)?|q|k|v|w|beta|log_decay|scale|valid|window|sink|prune|logit_bound|cu_seqlens|write"
    r"|delta_rule|return_lse|impl|keys|values|gates|eps|bound|form)\b"
)
ODD: list[Any] = [None, True, False, 0, 1, -1, 1.5, "1", "no", [], [0.0], (), {}, object(), math.nan, math.inf, 10**400]
NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    1e30,
    -1e30,
    1e15,
    1e100,
    1e-310,
    0.0,
    3.4e38,
    -3.4028234663852886e38,
    -1e4,
    -9999.0,
    2.5,
]


def refusal(error: Exception, options: dict[str, Any]) -> bool:
    """Whether an error names what is wrong."""
    if not isinstance(error, (ValueError, TypeError, RuntimeError)) or isinstance(error, RecursionError):
        return False
    text = str(error)
    surplus = "unexpected keyword argument" in text and any(f"'{name}'" in text for name in options)
    return surplus or bool(NAMED.match(text)) or text.startswith("form 'fla'")


def put(x: Tensor, value: float, rng: random.Random) -> Tensor:
    """``x`` with some entries set."""
    if x.numel() and x.is_floating_point() and not x.is_meta and x.layout == torch.strided:
        x = x.clone(memory_format=torch.contiguous_format)
        flat = x.view(-1)
        for _ in range(rng.choice([1, 1, 3, flat.numel()])):
            flat[rng.randrange(flat.numel())] = torch.tensor(value, dtype=torch.float64).to(x.dtype)
    return x


def strided(x: Tensor, rng: random.Random) -> Tensor:
    """The same numbers with other strides."""
    kind = rng.randrange(0 if x.layout == torch.strided else 4, 5)
    if kind == 4:
        return x
    if kind == 0 and x.ndim > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == 1:
        return torch.stack([x, x], -1)[..., 0]
    if kind == 2 and x.ndim > 2:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.cat([x, x], -1)[..., : x.shape[-1]] if x.ndim else x


def reshaped(x: Tensor, rng: random.Random) -> Tensor:
    """Another shape."""
    if x.layout != torch.strided:
        return x
    axis = rng.randrange(max(1, x.ndim))
    kind = rng.randrange(6)
    if kind == 0 or not x.ndim:
        return x[None]
    if kind == 1:
        return x[..., 0]
    if kind == 2:
        return x.narrow(axis, 0, max(0, x.shape[axis] - 1))
    if kind == 3:
        return torch.cat([x, x], axis)
    if kind == 4:
        return x.narrow(axis, 0, 0)
    return x.transpose(axis, rng.randrange(x.ndim))


def retyped(x: Tensor, rng: random.Random) -> Any:
    """Another dtype, device or kind of thing."""
    if x.is_meta or x.layout != torch.strided:
        return None
    kind = rng.randrange(10)
    if kind < 6:
        dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
        return x.nan_to_num().clamp(-9, 9).to(dtypes[kind])
    return [x.tolist, lambda: x.to("meta"), lambda: np.asarray(x.detach().float()), lambda: x.to_sparse()][kind - 6]()


def spoiled(x: Any, rng: random.Random) -> Any:
    """An argument in some other form, which may serve as well or may not."""
    if not isinstance(x, Tensor):
        return rng.choice(ODD)
    change = rng.randrange(10)
    if change < 5:
        return put(x, rng.choice(NUMBERS), rng)
    if change < 7:
        return strided(x, rng)
    if change == 7:
        return reshaped(x, rng)
    return retyped(x, rng) if change == 8 else rng.choice(ODD)


def borders(T: int, rng: random.Random) -> Any:
    """Borders of packed sequences in T tokens, mostly good ones, empty sequences among them."""
    inner = sorted(rng.choices(range(T + 1), k=rng.randrange(4)))
    good = torch.tensor([0, *inner, T], dtype=rng.choice([torch.int32, torch.int64]))
    bad: list[Callable[[], Any]] = [
        lambda: good.flip(0), lambda: good + 1, lambda: good[:-1], lambda: good[:0], lambda: good.float(),
        lambda: good.tolist(), lambda: good[None], lambda: good - 1, lambda: good * 2, lambda: good.to("meta"),
    ]  # fmt: skip
    return good if rng.random() < 0.8 else rng.choice(bad)()


def masks(B: int, T: int, rng: random.Random) -> Any:
    """Which tokens exist, mostly as it should be given."""
    good = torch.rand(B, T) < rng.choice([0.0, 0.3, 0.8, 1.0])
    bad: list[Callable[[], Any]] = [
        lambda: good.long(), lambda: good.float(), lambda: (~good) * -1e4, lambda: good[:, :-1], lambda: good.tolist(),
        lambda: good[0] if B else good, lambda: good.to("meta"), lambda: good[..., None],
    ]  # fmt: skip
    return good if rng.random() < 0.8 else rng.choice(bad)()


def shared_options(T: int, H: int, decays: bool, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Options of the softmax side."""
    if rng.random() < 0.3:
        yield "window", rng.choice([1, 2, 3, T, T + 5, 10**9, 0, -3, 2.0, True, "3", None, 2**70])
    if rng.random() < 0.3:
        sink = torch.randn(H)
        yield "sink", sink if rng.random() < 0.6 else spoiled(sink, rng)
    if rng.random() < (0.4 if decays else 0.1):
        prune = Prune(rng.choice([1e-12, 1e-4, 0.3]), rng.choice(["tail", "paper"]))
        yield "prune", prune if rng.random() < 0.8 else rng.choice([*ODD, Prune, 1e-3])
        if rng.random() < 0.3:
            bound = torch.full((H,), 1e6)
            yield "logit_bound", bound if rng.random() < 0.5 else spoiled(bound, rng)
    if rng.random() < 0.3:
        yield "return_lse", rng.choice([True, True, False, 1, "yes", None])


def right(
    side: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The output and log-sum-exp by the float64 oracle, on each sequence of tokens that exist, and where they count.

    Returns:
        o ``[B, T, H, V]`` and lse ``[B, T, H]`` (None on the linear side), zero where ``there`` ``[B, T]`` is false.
    """
    (B, T, H, _), V = q.shape, v.shape[3]
    names = ("scale", "write", "delta_rule") if side == "linear" else ("scale", "window", "sink")
    given = {name: options[name] for name in names if options.get(name) is not None}
    valid, cuts = options.get("valid"), options.get("cu_seqlens")
    there = torch.ones(B, T, dtype=torch.bool) if valid is None else valid
    if given.get("window") is not None:
        given["window"] = min(given["window"], T)
    gate = gate.per_token(q)
    o, lse = torch.zeros(B, T, H, V, dtype=torch.float64), torch.zeros(B, T, H, dtype=torch.float64)
    ends = [0, T] if cuts is None else cuts.tolist()
    for b in range(B):
        for start, stop in itertools.pairwise(ends):
            index = start + there[b, start:stop].nonzero()[:, 0]
            if not len(index):
                continue

            def pick(x: Tensor, b: int = b, index: Tensor = index) -> Tensor:
                return x[b : b + 1, index]

            local = {name: pick(x) if name == "write" else x for name, x in given.items()}
            inputs = pick(q), pick(k), pick(v), gate.map(pick)
            if side == "linear":
                o = o.index_put((torch.tensor(b), index), oracle.linear(*inputs, **local)[0])
            else:
                rows, sums = oracle.softmax(*inputs, **local, return_lse=True)
                o = o.index_put((torch.tensor(b), index), rows[0])
                lse = lse.index_put((torch.tensor(b), index), sums[0])
    return o, None if side == "linear" else lse, there


def clean_rows(there: Tensor, *tensors: Tensor, limit: float = 1e6) -> Tensor:
    """Rows of the batch ``[B]`` in which every token that exists holds ordinary numbers."""
    clean = torch.ones(there.shape[0], dtype=torch.bool)
    for x in tensors:
        if x.ndim > 1:
            fine = x.isfinite() & (x.abs() < limit)
            clean &= (fine.flatten(2).all(-1) | ~there).all(-1)
    return clean


def right_or_refused(
    fuzz: Any,
    times: int,
    make: Callable[[random.Random], Any],
    spoils: list[int],
    run: Callable[[Any, random.Random], Any],
    check: Callable[[Any, Any], None],
) -> None:
    """Random calls, spoiled that often, are right or refused by name; enough of them are answered.

    Args:
        fuzz: the fixture.
        times: calls in the short profile.
        make: a call that is right, from a generator; with ``spoil``, ``story`` and ``options``.
        spoils: how often a call is spoiled, one of these.
        run: what a call gives.
        check: raises where that is wrong.
    """
    answered = 0
    for rng in fuzz(times):
        call = make(rng)
        for _ in range(rng.choice(spoils)):
            call.spoil(rng)
        story = "; ".join([*call.story, f"options {sorted(call.options.items())}"])
        try:
            got = run(call, rng)
        except Exception as error:
            if refusal(error, call.options):
                continue
            raise AssertionError(f"{story}: {error!r}") from error
        try:
            check(call, got)
        except Exception as error:
            raise AssertionError(f"{story}: {error}") from error
        answered += 1
    assert answered > fuzz.done // 8 or fuzz.done < 20
