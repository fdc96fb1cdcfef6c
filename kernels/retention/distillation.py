"""What keys learn from later rows, as one custom op: no gradient flows to the target, so that the forward pass has the
gradient already, and memory is O(T)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.kernels.common.constants import GATE_FULL, GATE_NONE, KEY_UNIT, LOG2E
from attnzoo.kernels.common.dense_reference import segment_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_sums
from attnzoo.kernels.common.launching import (
    cdiv,
    dot_precision,
    gate_kind,
    head_block,
    retention_strides,
    row_strides,
)
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.retention import Rule
from attnzoo.kernels.common.rows import first_visible_of_closed, first_visible_without_gate
from attnzoo.kernels.retention.distilling import retention_lesson_kernel
from attnzoo.kernels.retention.lesson import SHORTEST, WORDS, Lesson

Some = Tensor | None
PROGRAMS = 1024  # that add up units, each in T numbers of its own, so that the order of sums is always the same
# Measured on an H200 with heads of 64 in bfloat16 (docs/benchmarks/log/linear.md).
ROWS = 16  # of a tile
KEYS = 64  # of a tile, where a row of q has at most WIDEST bytes, else half of it
WIDEST = 512
REGISTERS = 128  # of a thread on Hopper, for head dims up to NARROW in 16 bits: what is wider would spill more
NARROW = 64


class Distilled(NamedTuple):
    """Divergence of each key, summed over rows, [B, T, G], and its gradient by the key's numbers [B, T, G, 1 or 2]."""

    divergence: Tensor
    dkeys: Tensor


class Distillation(NamedTuple):
    """Queries and keys of attention, its values, outputs [B, T, H, V] and log-sum-exps [B, T, H], and the numbers of
    keys [B, T, G, 1 or 2]; G divides the heads of k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    keys: Tensor
    log_decay: Some
    options: OpOptions
    rule: Rule
    lesson: Lesson


def _forward(x: Distillation) -> Distilled:
    q, k, keys, options, lesson = x.q, x.k, x.keys, x.options, x.lesson
    (B, T, H, K), (G, kind), gate = q.shape, keys.shape[2:], gate_kind(x.log_decay)
    doc, BK = segment_starts(options.cu_seqlens, T), head_block(K)
    BS = KEYS if BK * q.element_size() <= WIDEST else KEYS // 2
    where, narrow = machine(q.device), BK <= NARROW and q.element_size() == 2
    registers = REGISTERS if narrow and where.hopper and where.descriptors else None
    with on_device_of(q):
        first = first_visible_without_gate(doc, options.window, T, q.device)
        lse = (x.lse.float().transpose(1, 2) * LOG2E).contiguous()
        c = base = since = lse
        if x.log_decay is not None and gate == GATE_FULL:
            c, base, since, _ = gate_sums(x.log_decay, doc, options.window or T)
        elif x.log_decay is not None:
            since = first_visible_of_closed(x.log_decay, T)
        value = _log_lengths(x.v[:, :, :: x.v.shape[2] // G], G, torch.finfo(torch.float32).tiny)
        output = _log_lengths(x.o, G, SHORTEST)
        row, stop = torch.arange(T, device=q.device), None
        tokens = row + 1
        if first is not None:
            stop = torch.searchsorted(first.view(T), row, right=True).int()
            tokens = tokens - first.view(T)
        made = Distilled(lse.new_empty((B, T, G)), keys.new_empty(keys.shape))
        pool, tiles = WORDS["pool"].index(lesson.pool), cdiv(T, BS)
        tau = x.rule.temperature * (LOG2E if lesson.pool == "softmax" else 1.0)

        def launch(unit: Tensor, programs: int, learns: bool) -> None:
            retention_lesson_kernel[(programs * B * G,)](
                q, k, lse, value, output, keys, lse if stop is None else stop, unit, *made, c, base,
                lse if x.log_decay is None else x.log_decay, since, T, programs, options.scale2,
                1.0 if pool == 2 else tau, math.log2(lesson.discount), float(x.rule.remembers), *q.stride()[:3],
                *k.stride()[:3], *row_strides(None if gate == GATE_NONE else since), *retention_strides(keys), H=H,
                REP=H // G, KREP=H // k.shape[2], K=K, BK=BK, KU=KEY_UNIT, GATE=gate, KIND=kind,
                HAS_STOP=stop is not None, POOL=pool, LARGEST=lesson.normalize == "max", MSE=lesson.divergence == "mse",
                LEARNS=learns, PREC=dot_precision(q.dtype), BT=ROWS, BS=BS, num_warps=4, num_stages=1,
                maxnreg=registers,
            )  # fmt: skip

        programs = min(tiles, cdiv(PROGRAMS, B * G))
        parts = lse.new_zeros((programs, B, G, T))
        launch(parts, programs, False)
        launch(parts.amax(0) if lesson.normalize == "max" else parts.sum(0) / tokens, tiles, True)
    return made


def _log_lengths(x: Tensor, G: int, least: float) -> Tensor:
    """log2 |x|^2, ``least`` at least, of x [B, T, heads, V], heads of each of G groups as one vector. # [B, G, T]"""
    squares: Tensor = x.float().square().sum(-1).unflatten(2, (G, -1)).sum(-1)
    return squares.clamp(min=least).log2().transpose(1, 2).contiguous()


def _fake(x: Distillation) -> Distilled:
    return Distilled(x.keys.new_empty(x.keys.shape[:3]), x.keys.new_empty(x.keys.shape))


class Scaled(NamedTuple):
    """The gradient of divergences [B, T, G], and their gradient by the keys' numbers."""

    ddivergence: Tensor
    dkeys: Tensor


class KeysGradient(NamedTuple):
    keys: Tensor


distillation_op = NamedOp("attnzoo::key_divergence", Distillation, Distilled, _forward, _fake)
scaled_op = NamedOp(
    "attnzoo::key_divergence_backward", Scaled, KeysGradient,
    lambda x: KeysGradient(x.ddivergence[..., None] * x.dkeys), lambda x: KeysGradient(torch.empty_like(x.dkeys)),
)  # fmt: skip


def _differentiate(given: Distillation, made: Distilled, grads: Distilled, wanted: set[str]) -> dict[str, Any]:
    return {} if grads.divergence is None else {"keys": scaled_op(Scaled(grads.divergence, made.dkeys)).keys}


distillation_op.differentiable(_differentiate, inputs=(), outputs=("dkeys",))
scaled_op.refuse_second_derivatives()
