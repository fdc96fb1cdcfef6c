"""Keys and values in 8 bits: what is stored, what is read, and how far an output may move."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from decode_cases import Case, attend, for_pruning, inputs, state_of
from fox_cases import DEVICE
from test_decode_step import STEPS, drawn, run
from torch import Tensor

from attnzoo import Prune
from attnzoo.kernels.decode.eight_bits import longer, quantised, restored, rounding
from attnzoo.kernels.decode.portable.eight_bits import decoded, encoded, power_of_2


def in_eight_bits(pool: dict[str, Any]) -> dict[str, Any]:
    """The same pool with keys and values in 8 bits; where nothing was written, any bits."""
    found, exponents = dict(pool), []
    for name in ("keys", "values"):
        bits, of = quantised(pool[name].nan_to_num())
        exponents.append(of)
        found[name] = bits.masked_fill_(pool[name].isnan(), 0x77)
    return found | {"exponents": torch.stack(exponents, -1)}


def vectors() -> Tensor:
    """Of all sizes, with zeros, entries that round up to the next power of two, and those far below the largest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 32, generator=generator) * torch.logspace(-30, 30, 2048)[:, None]
    x[:512, 4:] *= torch.logspace(-6, 0, 512)[:, None]
    x[512] = 0.0
    x[513:600, 3] = 2 * x[513:600].abs().amax(-1) * (1 - 2**-6)
    x[600:1200] = (
        x[600:1200].sign() * (1 + torch.randint(64, (600, 32), generator=generator) / 32)
    ) * 2.0 ** torch.randint(-20, 20, (600, 1), generator=generator)  # many lie between two numbers
    return x.to(DEVICE)


def test_a_vector_is_rounded_by_at_most_a_sixteenth_and_the_bound_is_nearly_reached() -> None:
    x = vectors()
    found = restored(*quantised(x))
    length = x.double().norm(dim=-1)
    assert ((found.double() - x.double()).norm(dim=-1) <= rounding(32) * length).all()
    assert (found.double().norm(dim=-1) <= longer(32) * length).all()
    worst = torch.full((1, 32), 1 + 2**-4)
    assert float((restored(*quantised(worst)) - worst).norm() / worst.norm()) > 0.94 * rounding(32)


@triton.jit
def stored_kernel(p_x, p_bits, p_e, p_y, D: tl.constexpr, EIGHT: tl.constexpr):
    o = tl.program_id(0) * 128 + tl.arange(0, 128)
    at = o[:, None] * D + tl.arange(0, D)[None, :]
    b, e = encoded(tl.load(p_x + at))
    tl.store(p_bits + at, b)
    tl.store(p_e + o, e.to(tl.int8))
    tl.store(p_y + at, decoded(b, EIGHT).to(tl.float32) * power_of_2(e)[:, None])


@pytest.mark.parametrize("which", [pytest.param(2, marks=pytest.mark.gpu), 1])
def test_kernels_store_and_read_the_same_bits(which: int) -> None:
    x = vectors()
    bits, exponents = quantised(x)
    mine, e, y = torch.zeros_like(bits), torch.zeros_like(exponents), torch.zeros_like(x)
    stored_kernel[(len(x) // 128,)](x, mine, e, y, D=32, EIGHT=which)
    assert torch.equal(e, exponents)
    assert torch.equal(mine, bits)
    assert torch.equal(y, restored(bits, exponents))


CASES = [
    Case(lengths=(150, 5), G=2, H=4, gate="mixed", first=(1, 0, 0, 0)),
    Case(lengths=(70, 129), T=3, H=2, G=1, gate="constant", K=24, V=40, sink=True),
    Case(lengths=(200,), H=2, G=2, gate="none", options={"window": 90}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_output_moves_by_no_more_than_the_bound(case: Case) -> None:
    """``2 tanh(eta / 2) + rho`` times the longest value, eta the largest change of a logit that rounding allows."""
    x = inputs(case, torch.float32)
    exact, found = (
        attend(x.q, pool, "reference", sink=x.sink, **case.options) for pool in (x.pool, in_eight_bits(x.pool))
    )
    q, k, v = (y.norm(dim=-1) for y in (x.q, x.k, x.v))
    k, v = (y.nan_to_num().amax((1, 2))[:, None, None] for y in (k, v))
    eta = case.K**-0.5 * q * k * rounding(case.K)
    moved = (found - exact).norm(dim=-1)
    assert (moved <= (2 * torch.tanh(eta / 2) + rounding(case.V)) * v).all()
    assert moved.amax() > 1e-3 * v.amax()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "case", [*CASES, replace(CASES[0], gate="strong", T=2, options={"prune": Prune(1e-3)})], ids=str
)
def test_kernels_read_8_bits_as_their_definition(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype)
    pool = in_eight_bits(x.pool | for_pruning(case, x))
    pool["k_norm"] = pool["k_norm"] * longer(case.K)
    ours, want = (attend(x.q, pool, impl, sink=x.sink, **case.options) for impl in ("triton", "reference"))
    assert ours.dtype == dtype
    band = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(ours, want, rtol=10 * band, atol=band)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("n", [0, 3, 4])
def test_a_step_writes_and_reads_8_bits_as_its_definition(n: int, dtype: torch.dtype) -> None:
    step, found = replace(STEPS[n], shift=False, norm=""), []
    for impl in ("triton", "reference"):
        rows, given = drawn(step, dtype)
        given = in_eight_bits(given)
        found.append((run(rows, given, impl), given))
    (o, ours), (want, theirs) = found
    there = [b for b in range(len(want)) if b != step.idle]
    band = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(o[there], want[there], rtol=10 * band, atol=band)
    for name in ("keys", "values", "exponents", "length"):
        assert torch.equal(ours[name], theirs[name]), name
    torch.testing.assert_close(ours["k_norm"], theirs["k_norm"], rtol=2e-6, atol=0)


def test_the_plan_is_that_of_pages_in_the_dtype_of_the_rows() -> None:
    """Tiles are held in it, and fewer warps would spill them."""
    from attnzoo.kernels.decode.op import _plan

    for K in (64, 128):
        x = inputs(Case(lengths=(70,), K=K, V=K), torch.float16)
        plans = [_plan(x.q, state_of(pool)) for pool in (x.pool, in_eight_bits(x.pool))]
        assert plans[0] == plans[1]


def test_pages_of_8_bits_without_their_exponents_are_refused() -> None:
    x = inputs(CASES[0], torch.float32)
    pool = in_eight_bits(x.pool)
    for wrong, message in (
        ({"exponents": None}, "keys: expected a floating dtype .*, got torch.uint8"),
        ({"exponents": pool["exponents"][:, :, :1]}, r"exponents: expected torch.int8 \(\d+, 64, 2\), got"),
        ({"keys": x.pool["keys"]}, "keys: expected torch.uint8 .*, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(x.q, pool | wrong, "reference")
    assert math.isfinite(float(attend(x.q, pool, "reference").sum()))
