"""The transition kernels of PaTH on one GPU, by themselves: errors against float64, then times of each kernel.

    python benchmarks/path_transitions_gpu.py [--shapes 2,24,16384,64 ...] [--launch block=4,128 carry=8, ...]

Each --launch is timed beside the table's own choice: a key of ``inverse.LAUNCH`` with warps and registers per thread
(nothing after the comma: no limit). bf16 q and k; w in float32 (as the layers give it) and in q's dtype; beta uniform
in 0..2; the hard inputs have beta = 2 and half of the w repeated.
"""

from __future__ import annotations

import argparse

import torch
from gpu import milliseconds, relative
from torch import Tensor

from attnzoo.kernels.path import levels
from attnzoo.kernels.path.levels import Block, Levels
from attnzoo.kernels.path.portable import blocks, carry, inverse

SHAPES = ((2, 24, 16384, 64), (2, 16, 16384, 128))
KERNELS = {  # keys of inverse.LAUNCH that a call uses
    "block": ("inverse", "product", "block"),
    "block_bwd": ("block_bwd", "product_bwd"),
    "carry": ("tree", "carry"),
    "carry_bwd": ("carry_bwd", "node"),
}
CASES = ((2, 1100, 4, 2, 64), (1, 2500, 2, 2, 128), (1, 700, 2, 1, 48))  # B, T, H, G, K


def draw(
    B: int, T: int, H: int, G: int, K: int, dtype: torch.dtype, w_dtype: torch.dtype, hard: bool = False
) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, w = (torch.randn(B, T, n, K, device="cuda", dtype=torch.float64) for n in (H, G, G))
    beta = 2 * torch.rand(B, T, G, device="cuda")
    if hard:
        w[:, torch.rand(T, device="cuda") < 0.5] = w[:, :1].clone()
        beta.fill_(2)
    return [q.to(dtype), k.to(dtype), (w / w.norm(dim=-1, keepdim=True)).to(w_dtype), beta]


def rows(levels: Levels, T: int) -> list[Tensor]:
    """The rows that the levels define."""
    each = enumerate(levels.levels_of(T))
    return [x for s, level in each for x in (levels.q[s, :, : level.queries], levels.k[s, :, : level.keys])]


def errors(case: tuple[int, ...], dtype: torch.dtype, w_dtype: torch.dtype, hard: bool) -> dict[str, float]:
    """Forward and backward against the float64 definitions, which are given the same gradients."""
    x = draw(*case, dtype, w_dtype, hard)
    wide, T = [t.double() for t in x], case[1]
    exact, got = levels.block_level(*wide), blocks.block_level(*x)
    exact_carried, carried = levels.carry(exact), carry.carry(got)
    n = exact.m.shape[1]
    found = {"diag": relative(got.diag.tril(), exact.diag), "qb": relative(got.q, exact.q)}
    found |= {"kb": relative(got.k, exact.k), "m": relative(got.m.double().sum(0)[:, :n], exact.m)}
    pairs = zip(rows(carried.levels, T), rows(exact_carried.levels, T), strict=True)
    found["levels"] = max(relative(a, b) for a, b in pairs)
    d = Levels(*(torch.randn_like(t) for t in carried.levels))
    dq, dk, ddiag = torch.randn_like(got.q), torch.randn_like(got.k), torch.randn_like(got.diag)
    exact_d = Levels(*(t.double() for t in d))
    down = carry.carry_backward(got, carried, d, dq, dk)  # overwrites d
    exact_down = levels.carry_backward(exact, exact_carried, exact_d, dq.double(), dk.double())
    grads = blocks.block_level_backward(*x, Block(ddiag, *down))
    exact_grads = levels.block_level_backward(*wide, Block(ddiag.double(), *exact_down))
    return found | {n: relative(a, b) for n, a, b in zip(("dq", "dk", "dw", "dbeta"), grads, exact_grads, strict=True)}


def times(
    shape: tuple[int, ...], launch: dict[str, tuple[int, int | None]], w_dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Milliseconds of the kernels of one shape, all of them or those that ``launch`` changes."""
    B, H, T, K = shape
    x = draw(B, T, H, H, K, torch.bfloat16, w_dtype)
    kept = inverse.new_kept(x[0], x[2])
    before = dict(inverse.LAUNCH)
    inverse.LAUNCH.update({name: (value, value) for name, value in launch.items()})
    try:
        block = blocks.block_level(*x, kept)
        carried = carry.carry(block)
        d = Levels(*(torch.randn_like(t) for t in carried.levels))
        grads = torch.randn_like(block.q), torch.randn_like(block.k)
        down = carry.carry_backward(block, carried, d, *grads)
        ddiag = torch.randn_like(block.diag)
        calls = {
            "block": lambda: blocks.block_level(*x),
            "block_bwd": lambda: blocks.block_level_backward(*x, Block(ddiag, *down), None, kept),
            "carry": lambda: carry.carry(block),
            "carry_bwd": lambda: carry.carry_backward(block, carried, d, *grads),
        }
        wanted = [n for n in calls if not launch or any(key in KERNELS[n] for key in launch)]
        return {n: round(milliseconds(calls[n], 40), 3) for n in wanted}
    finally:
        inverse.LAUNCH.update(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="B,H,T,K ...")
    parser.add_argument("--launch", nargs="*", default=[], help="KEY=WARPS,REGISTERS ...")
    args = parser.parse_args()
    for case in CASES:
        for dtype, hard in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)):
            for w_dtype in dict.fromkeys((torch.float32, dtype)):
                found = {n: f"{e:.1e}" for n, e in errors(case, dtype, w_dtype, hard).items()}
                print(case, dtype, "w", w_dtype, "hard" if hard else "", found, flush=True)
    shapes = [tuple(int(n) for n in s.split(",")) for s in args.shapes] if args.shapes else SHAPES
    for shape in shapes:
        for w_dtype in (torch.float32, torch.bfloat16):
            print(shape, "w", w_dtype, times(shape, {}, w_dtype), flush=True)
        for change in args.launch:
            key, _, numbers = change.partition("=")
            if key not in inverse.LAUNCH:
                parser.error(f"--launch: expected one of {', '.join(inverse.LAUNCH)}, got {key!r}")
            warps, _, registers = numbers.partition(",")
            launch = {key: (int(warps), int(registers) if registers else None)}
            print(shape, launch, times(shape, launch), flush=True)


if __name__ == "__main__":
    main()
