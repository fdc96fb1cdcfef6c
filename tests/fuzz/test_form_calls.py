"""Random calls of every form of every variant: right by the float64 oracle, or refused by the argument's name."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from typing import Any

import torch
from calls import ODD, borders, clean_rows, masks, reshaped, retyped, right, right_or_refused, shared_options, spoiled
from torch import Tensor

from attnzoo import Gate, KVCache, RecurrentState, get, list_variants
from attnzoo.algebra.gate import is_closed
from attnzoo.samples import random_inputs
from attnzoo.testing import CPU_FORMS, block_sizes

REGIMES = ("mixed", "open", "closing", "zero", "closed")


class Call:
    """One call: inputs, options, and all that was done to them, for the message of a failure."""

    def __init__(self, rng: random.Random) -> None:
        self.name = rng.choice(list_variants())
        self.variant = get(self.name)
        self.way = rng.choice([*(set(CPU_FORMS) & set(self.variant.forms)), "extend", "extend"])
        self.packed = self.way != "extend" and rng.random() < 0.2
        G = rng.choice([1, 1, 2, 3])
        B, T, H = (
            (1 if self.packed else rng.choice([1, 2, 2, 3])),
            rng.choice([1, 2, 3, 5, 9, 17, 40]),
            G * rng.choice([1, 2]),
        )
        self.sizes = sizes = (B, T, H, G, rng.choice([2, 4, 8]), rng.choice([1, 3, 8]))
        dtype = rng.choice([torch.float64] * 4 + [torch.float32] * 2 + [torch.bfloat16, torch.float16])
        self.block = rng.choice([None, 4, 8, 5])
        self.story = [f"{self.way} of {self.name}, B, T, H, G, K, V = {sizes}, {dtype}, blocks {self.block}"]
        regime = rng.choice(REGIMES)
        q, k, v, gate = random_inputs(self.name, *sizes, dtype=torch.float64, regime=regime, seed=rng.randrange(10**6))
        q, k, v, gate = (
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            gate.map(lambda x: x.to(torch.promote_types(dtype, torch.float32))),
        )
        self.given: dict[str, Any] = {"q": q, "k": k, "v": v, "gate": gate}
        self.options: dict[str, Any] = dict(self._options(rng, B, T, H, G))
        if self.options.get("delta_rule") is True:
            self.given["gate"] = replace(gate, w=k / k.norm(dim=-1, keepdim=True))
            self.given["k"] = self.given["gate"].w
        self.state: Any = None

    def _options(self, rng: random.Random, B: int, T: int, H: int, G: int):
        if rng.random() < 0.3:
            yield "scale", rng.choice([0.3, 2, -1.0, 1.0, *ODD])
        if rng.random() < 0.3:
            yield "valid", masks(B, T, rng)
        if self.packed or rng.random() < 0.03:
            yield "cu_seqlens", borders(T, rng)
        if self.variant.side == "softmax":
            yield from shared_options(T, H, "log_decay" in self.variant.requires, rng)
        elif rng.random() < 0.3:
            if "w" in self.variant.requires and rng.random() < 0.7:
                yield "delta_rule", rng.choice([True, True, True, False, 1, "no"])
            else:
                write = torch.rand(B, T, rng.choice([G, H]))
                yield "write", write if rng.random() < 0.7 else spoiled(write, rng)
        if rng.random() < 0.03:
            yield rng.choice(["sclae", "mask", "window", "write", "is_causal"]), 1

    def spoil(self, rng: random.Random) -> None:
        """Change one thing."""
        kind = rng.randrange(8)
        name = rng.choice("qkv")
        gate = self.given["gate"]
        if kind < 2:
            self.given[name] = spoiled(self.given[name], rng)
            self.story.append(f"spoiled {name}")
        elif kind == 2:
            change = rng.choice([reshaped, retyped])
            for name in "qkv":
                if isinstance(self.given[name], Tensor):
                    self.given[name] = change(self.given[name], random.Random(7))
            self.story.append(f"{change.__name__} q, k, v")
        elif kind < 6 and isinstance(gate, Gate) and gate.parts:
            part = rng.choice(gate.parts)
            x = getattr(gate, part)
            if isinstance(x, Tensor) and part == "log_decay" and rng.random() < 0.2 and x.ndim == 3 and x.numel():
                x = x[0, 0]
            elif isinstance(x, Tensor) and part == "angle" and rng.random() < 0.3 and x.ndim == 4 and x.numel():
                x = x[:, :, :1] if rng.random() < 0.5 else x[0, 0, 0]
            else:
                x = spoiled(x, rng)
            self.given["gate"] = replace(gate, **{part: x})
            self.story.append(f"changed {part}")
        elif kind == 6:
            other = random_inputs(rng.choice(list_variants()), 2, 9, 2, 1, 4, 3)[3]
            self.given["gate"] = rng.choice([other, None, {}, Gate(), "gate", 0.5])
            self.story.append("another gate")
        else:
            name = rng.choice(list_variants())
            same = isinstance(self.given["q"], Tensor) and self.given["q"].ndim == 4 and rng.random() < 0.7
            sizes = self.sizes if same else (2, 5, 2, 1, 4, 3)
            _, state = get(name).extend(*random_inputs(name, *sizes))
            matrix = torch.zeros(rng.choice([0, 1, 2]), 2, 4, 3)
            self.state = rng.choice(
                [
                    state,
                    {},
                    matrix,
                    RecurrentState(matrix),
                    RecurrentState(None),
                    KVCache(None, None),
                    KVCache(matrix, matrix),
                ]
            )
            self.story.append(f"a state: {type(self.state).__name__} of {name}")

    def run(self, rng: random.Random) -> Any:
        q, k, v, gate = self.given.values()
        if self.way != "extend":
            return self.variant.forms[self.way](q, k, v, gate, **self.options)
        if self.state is not None or not self._fits():
            return self.variant.extend(q, k, v, gate, self.state, **self.options)[0]
        T = q.shape[1]
        cuts = sorted({0, T, *(rng.randrange(T + 1) for _ in range(3))})
        self.story.append(f"cuts {cuts}")
        state, outputs = None, []
        for start, stop in itertools.pairwise(cuts):

            def now(x: Any, start: int = start, stop: int = stop) -> Any:
                whole = isinstance(x, Tensor) and x.layout == torch.strided and x.ndim > 1 and x.shape[1] == T
                return x[:, start:stop] if whole else x

            options = {name: now(x) if name in ("valid", "write") else x for name, x in self.options.items()}
            o, state = self.variant.extend(now(q), now(k), now(v), gate.map(now), state, **options)
            outputs.append(o)
        if outputs and isinstance(outputs[0], tuple):
            return tuple(torch.cat(parts, 1) for parts in zip(*outputs, strict=True))
        return torch.cat(outputs, 1)

    def _fits(self) -> bool:
        """Whether the inputs agree on how many tokens there are, so that they can be cut."""
        q, k, v, gate = self.given.values()
        rows = [q, k, v, *([getattr(gate, part) for part in gate.parts] if isinstance(gate, Gate) else [None])]
        if not all(isinstance(x, Tensor) and x.layout == torch.strided and x.ndim for x in rows):
            return False
        options = [x for name in ("valid", "write") if isinstance(x := self.options.get(name), Tensor)]
        lengths = {x.shape[1] if x.ndim > 1 else 0 for x in (*options, *(x for x in rows if x.ndim > 1))}
        return len(lengths) == 1 and 0 not in lengths


def check(call: Call, got: Any) -> None:
    """What a call gave is right, and so are its gradients where the inputs are ordinary numbers."""
    q, k, v, gate = call.given.values()
    options = {name: x for name, x in call.options.items() if x is not None}
    o, lse = got if isinstance(got, tuple) else (got, None)
    assert isinstance(got, tuple) == (options.get("return_lse") is True)
    assert o.shape == (*q.shape[:3], v.shape[3]), f"shape {tuple(o.shape)}"
    assert o.dtype == v.dtype
    if o.is_meta or not o.numel():
        return
    logs = [(part, getattr(gate, part)) for part in gate.parts]
    parts = [x.masked_fill(is_closed(x), 0.0) if part.startswith("log") else x for part, x in logs]
    write = options.get("write")
    there = torch.ones(q.shape[:2], dtype=torch.bool) if (valid := options.get("valid")) is None else valid
    clean = clean_rows(there, *parts, *([] if write is None else [write]))
    clean &= clean_rows(there, q, k, v, limit=torch.finfo(q.dtype).max)
    there = there & clean[:, None]
    shared = all(bool(x.isfinite().all() and (x.abs() < 1e6).all()) for x in parts if x.ndim == 1)
    if not there.any() or not shared:
        return
    size = {name: float(call.given[name][there].abs().max()) for name in "qkv"}
    scale, product = options.get("scale", q.shape[-1] ** -0.5), size["q"] * size["k"] * q.shape[-1]
    score = scale * product
    written = max(1.0, 1.0 if write is None else float(write[there].abs().max()))
    if max(scale, 1.0) * product * (1 + size["v"] * written) > 1e-3 * torch.finfo(q.dtype).max:
        return  # no room for it
    if call.state is not None and call.way == "extend":  # of a past that is not known here
        assert o[there].isfinite().all()
        return
    turn = max([1.0, *(float(x.nan_to_num(neginf=0.0).abs().max()) for x in parts if x.numel())])
    noise = 64 * torch.finfo(q.dtype).eps * (1 + score) * turn * q.shape[1]
    if call.variant.side == "linear":
        allowed = noise * size["v"] * written
    else:
        dropped = options["prune"].eps if "prune" in options else 0.0
        allowed = 2 * (min(noise, 1.0) + dropped) * size["v"]
    expected, sums, _ = right(call.variant.side, q, k, v, gate, options)
    error = (o.double() - expected)[there].abs().max()
    assert error <= allowed + 1e-300, f"off by {error:.2e}, allowed {allowed:.2e}"
    if lse is not None and sums is not None and "prune" not in options:
        error = ((lse.double() - sums)[there].abs() / (1 + sums[there].abs())).max()
        assert error <= noise, f"lse off by {error:.2e}, allowed {noise:.2e}"
    ordinary = q.dtype == torch.float64 and q.shape[1] < 20 and score * turn * size["v"] < 1e4 and bool(clean.all())
    if ordinary and "prune" not in options:
        _check_gradients(call, there, options)


def _check_gradients(call: Call, there: Tensor, options: dict[str, Any]) -> None:
    leaves = {name: call.given[name].detach().clone().requires_grad_() for name in "qkv"}
    gate = call.given["gate"].map(lambda x: x.detach().clone().requires_grad_())
    if options.get("delta_rule"):
        gate = replace(gate, w=leaves["k"])
    leaves |= {f"gate.{part}": getattr(gate, part) for part in gate.parts}
    inputs = [*(leaves[name] for name in "qkv"), gate]
    extend = call.way == "extend"
    with block_sizes(call.block):
        got = (call.variant.extend if extend else call.variant.forms[call.way])(*inputs, **options)
    got = got[0] if extend else got
    outputs = [got[0] if isinstance(got, tuple) else got, right(call.variant.side, *inputs, options)[0]]
    cotangent = torch.randn(outputs[0].shape, dtype=torch.float64) * there[..., None, None]
    found, expected = (
        torch.autograd.grad(o, list(leaves.values()), cotangent, allow_unused=True, materialize_grads=True)
        for o in outputs
    )
    most = max(1.0, *(float(x.abs().max()) for x in expected))
    for name, x, y in zip(leaves, found, expected, strict=True):
        error = float((x - y).abs().max())
        assert error <= 1e-8 * most, f"gradient of {name} off by {error:.2e} of {most:.2e}"


def answer(call, rng):
    mode = rng.choice([torch.no_grad, torch.inference_mode, contextlib.nullcontext])
    with mode(), block_sizes(call.block):
        return call.run(rng)


def test_random_calls_are_right_or_refused_by_name(fuzz):
    right_or_refused(fuzz, 220, Call, [0, 0, 1, 1, 1, 2], answer, check)
