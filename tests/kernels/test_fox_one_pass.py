"""What surrounds the one-pass backward: plain Triton, so it runs under the interpreter; the pass itself needs a GPU."""

from __future__ import annotations

import pytest
import torch
from fox_cases import DEVICE, SMALL

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.device import triton_version
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.fox.operands import FoxOperands
from attnzoo.kernels.fox.plan import HOPPER_BACKWARD
from attnzoo.kernels.fox.portable.forward import fox_forward
from attnzoo.kernels.fox.reference import fox_reference

pytestmark = pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 for Gluon")
B, H, K, RU = 2, 3, 40, ROW_UNIT


@pytest.mark.parametrize(("T", "K", "BK"), [(130, 40, 64), (201, 40, 64), (130, 100, 128)])
@pytest.mark.parametrize("sink", [False, True])
def test_dq_and_row_sums_reach_their_places(T: int, K: int, BK: int, sink: bool) -> None:
    """dQ stored as the products' threads hold it, and sums per pair of rows, come out per row and column."""
    from attnzoo.kernels.fox.hopper import backward as one_pass

    tiles = HOPPER_BACKWARD[BK]
    BT, M = tiles.BT, tiles.BT // 16
    N = tiles.num_warps // M
    S, Tp = T + 9, -(-T // RU) * RU
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    dq, sums, drow, dkey = randn(B * H, Tp, BK), randn(B * H, Tp), randn(B, H, T), randn(B, H, S)
    sums[:, T:] = 0.0  # rows past the end have no weights
    # row = (warp, half, lane / 4), column = (warp, step, lane % 4, parity), as in the registers of a wgmma
    held = dq.view(B * H, Tp // BT, M, 2, 8, N, BK // N // 8, 4, 2).permute(0, 1, 6, 5, 2, 4, 7, 3, 8).contiguous()
    pairs = sums.view(B * H, Tp // 2, 2).sum(-1)
    got = torch.full((B, T, H, K), float("nan"), device=DEVICE)
    columns = dkey.clone()
    one_pass.fox_finish_kernel[(B * H * -(-T // BT),)](
        held, got, pairs, drow, columns, T, S, 0.5, H=H, K=K, BK=BK, BT=BT, RU=RU, M=M, N=N, GATE=2, HAS_ROW=sink
    )
    torch.testing.assert_close(got, 0.5 * dq[:, :T, :K].view(B, H, T, K).transpose(1, 2))
    taken = (dkey - columns)[:, :, S - T :]
    excess = sums[:, :T].view(B, H, T) - (drow if sink else 0.0)
    even = T // 2 * 2
    torch.testing.assert_close(taken[..., 0:even:2], taken[..., 1:even:2])  # halves of a pair
    torch.testing.assert_close(
        taken[..., :even].unflatten(-1, (-1, 2)).sum(-1), excess[..., :even].unflatten(-1, (-1, 2)).sum(-1)
    )
    torch.testing.assert_close(taken[..., even:], excess[..., even:])  # a last row without a partner
    assert torch.equal(columns[:, :, : S - T], dkey[:, :, : S - T])


@pytest.mark.parametrize(("S", "K", "V", "BK"), [(130, 40, 64, 64), (201, 100, 72, 128)])
def test_sums_of_heads_reach_dk_and_dv(S: int, K: int, V: int, BK: int) -> None:
    """What query heads have added up tile by tile, as the products' threads hold it, comes out per key."""
    from attnzoo.kernels.fox.hopper import backward as one_pass

    G, BS = 2, HOPPER_BACKWARD[BK].BS
    N, W = B * G * -(-S // BS), BS // 16
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(2, B, G, -(-S // BS) * BS, BK, generator=generator).to(DEVICE)
    held = sums.view(2, N, W, 2, 8, BK // 8, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7).contiguous()
    dk, dv = (torch.full((B, S, G, D), float("nan"), device=DEVICE) for D in (K, V))
    one_pass.fox_keys_kernel[(N,)](held, dk, dv, S, 0.5, G=G, K=K, V=V, BK=BK, BS=BS)
    for got, want in zip((dk, dv), (0.5 * sums[0], sums[1]), strict=True):
        assert torch.equal(got, want[:, :, :S, : got.shape[3]].transpose(1, 2))


@pytest.mark.parametrize("o_rest", [False, True])
def test_delta_takes_the_dropped_part_of_the_output(o_rest: bool) -> None:
    from attnzoo.kernels.fox.hopper import backward as one_pass

    T, Tp = 70, RU
    generator = torch.Generator().manual_seed(0)
    exact, do = (torch.randn(B, T, H, K, generator=generator).to(DEVICE) for _ in range(2))
    o = exact.half()
    dropped = (exact - o.float()).half()
    lse = torch.randn(B, H, T, generator=generator).to(DEVICE)
    rows, delta = (torch.full((B * H, Tp), float("nan"), device=DEVICE) for _ in range(2))
    one_pass.fox_bwd_rows_kernel[(B * H * (Tp // 64),)](
        o, dropped if o_rest else o, do.half(), lse, lse, rows, delta, lse, lse, lse, lse, lse, T, T, *o.stride()[:3],
        *o.stride()[:3], H=H, V=K, BV=64, BT=64, RU=RU, KU=KEY_UNIT, GATE=0, HAS_SINK=False, HAS_DLSE=False,
        HAS_REST=o_rest,
    )  # fmt: skip
    assert torch.equal(rows[:, :T].view(B, H, T), lse)
    assert bool((rows[:, T:] == float("inf")).all())
    assert bool((delta[:, T:] == 0.0).all())
    want = (exact.double() * do.half().double()).sum(-1).transpose(1, 2)
    error = float((delta[:, :T].view(B, H, T).double() - want).norm() / want.norm())
    assert error < 1e-6 if o_rest else 1e-5 < error < 1e-3


def test_the_forward_fills_all_of_what_the_rounding_dropped() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, 70, H, K, generator=generator).half().to(DEVICE) for _ in range(3))
    rest = torch.full_like(q, float("nan"))
    operands, plan = FoxOperands(q, k, v, None, None, OpOptions(None, None, 0.2)), Plan("", "", True, (("fwd", SMALL),))
    o, _ = fox_forward(operands, RowGates(), plan, o_rest=rest)
    exact = fox_reference(q.double(), k.double(), v.double(), log_decay=None, scale=0.2)
    assert float((o.double() + rest.double() - exact).norm()) < 0.8 * float((o.double() - exact).norm())
