"""Both ops under torch.library's checks, torch.compile and CUDA graphs; the public functions' errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_cases import Case, attend, inputs, ours, state_of, within_budget
from fox_cases import DEVICE
from named_ops import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.decode import (
    AttentionOptions,
    KeyPages,
    OpenGroup,
    PagedState,
    PageTable,
    PathGroups,
    PathTokens,
    paged_append,
    paged_attention,
)
from attnzoo.kernels.decode.operands import PagedInference, PageWrite
from attnzoo.kernels.decode.plan import DecodeCall, plan, workspace
from attnzoo.kernels.decode.portable import attention, page_shares
from attnzoo.kernels.decode.portable import path_pages as walks

CASE = Case(lengths=(70, 5), T=2, H=2, G=1, K=8, V=8, sink=True)


def state(case: Case, x: Any) -> dict[str, torch.Tensor]:
    """What ``paged_append`` changes, by name, the sums of no meaning."""
    B, G, N = x.pool["table"].shape
    pool = {name: x.pool[name] for name in ("keys", "values", "table", "first")}
    pool |= {name: x.pool[name].nan_to_num() for name in ("decay", "page_sum")}
    pool |= {"k_norm": torch.zeros(B, G, N), "total": torch.zeros(B, case.H, dtype=torch.float64)}
    pool |= {"since": torch.zeros(B, case.H, dtype=torch.int32), "n_log": pool["page_sum"] * 0}
    pool |= {"closed": pool["n_log"].long(), "length": x.pool["length"].clone()}
    return {name: y.to(DEVICE) for name, y in pool.items()}


def test_opcheck() -> None:
    from attnzoo.kernels.decode.op import paged_infer_op, paged_write_op

    x = inputs(CASE, torch.float32)
    options = OpOptions(None, None, 0.3, 40)
    opcheck(paged_infer_op, PagedInference(x.q, state_of(x.pool), x.pool["first_visible"], None, x.sink, options))
    gates = torch.zeros(2, 2, 2, device=DEVICE)
    opcheck(paged_write_op, PageWrite(x.k[:, :2], x.v[:, :2], gates, None, state_of(state(CASE, x))))


def step(x: Any, kept: dict[str, torch.Tensor], q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    pages = state_of(kept)
    visible = paged_append(k, k, pages, log_decay=g, impl="triton")
    return paged_attention(q, pages, first_visible=visible, impl="triton")


def new_tokens(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, 2, n, 8, generator=generator).to(DEVICE) for n in (2, 1))
    return [q, k, -torch.rand(2, 2, 2, generator=generator).to(DEVICE)]


def test_autocast_does_not_reach_inside_the_reference() -> None:
    x = inputs(CASE, torch.float32)
    pages = {name: x.pool[name] for name in ("keys", "values", *PageTable._fields)}
    want = attend(x.q, pages, "reference")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(attend(x.q, pages, "reference"), want)


def test_a_compiled_step_changes_the_same_pages() -> None:
    x, compiled = inputs(CASE, torch.float32), torch.compile(step, fullgraph=True, backend="aot_eager")
    kept = [state(CASE, x) for _ in range(2)]
    for one in kept:
        one["keys"], one["values"] = (one[name].nan_to_num() for name in ("keys", "values"))
    for seed in range(2):
        new = new_tokens(seed)
        assert torch.equal(compiled(x, kept[0], *new), step(x, kept[1], *new))
    for name in kept[0]:
        assert torch.equal(kept[0][name], kept[1][name]), name


@pytest.mark.gpu
def test_a_captured_step_stays_right_while_sequences_grow() -> None:
    """One graph, recorded at lengths that later steps leave far behind, over borders of pages and evictions."""
    case = Case(lengths=(130, 70), T=2, H=2, G=1, K=64, V=64)
    x = inputs(case, torch.bfloat16)
    B, S = x.k.shape[:2]
    kept = [state(case, x) for _ in range(2)]
    for one in kept:
        one["length"] -= 62
        one["table"] = torch.full_like(one["table"], -1)
        one["table"][:, :, :3] = torch.arange(B * 3, device=DEVICE).view(B, 1, 3)
    static = [torch.zeros(B, 2, n, 64, dtype=torch.bfloat16, device=DEVICE) for n in (2, 1)]
    static.append(torch.zeros(B, 2, 2, device=DEVICE))
    spare = {name: y.clone() for name, y in kept[0].items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x, spare, *static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(x, kept[0], *static)
    for seed in range(31):
        generator = torch.Generator().manual_seed(seed)
        new = [torch.randn(y.shape, generator=generator).to(y) for y in static]
        new[2] = -new[2].abs()
        for to, y in zip(static, new, strict=True):
            to.copy_(y)
        if seed == 20:
            x.pool["first"][0] = 1  # of both
        graph.replay()
        assert torch.equal(o, step(x, kept[1], *new))
    assert kept[0]["length"].tolist() == [130, 70]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(2, 2, 2)}, r"q: expected \[B, T, heads, dim\], got shape \(2, 2, 2\)"),
    ({"q": torch.zeros(2, 17, 2, 8)}, r"q: expected 1 to 16 tokens, got T=17"),
    ({"q": torch.zeros(3, 2, 2, 8)}, r"table: expected \[B=3, G, N\], got \(2, 1, 3\)"),
    ({"keys": torch.zeros(6, 48, 8)}, r"keys: expected \[P, PAGE, K\], PAGE a power of 2 from 16 on, got \(6, 48, 8\)"),
    ({"keys": torch.zeros(6, 64, 16)}, r"keys: expected torch.float32 \[P, PAGE, K=8\] as in q, got"),
    ({"keys": torch.zeros(6, 8, 64).mT}, r"keys: expected a contiguous tensor"),
    ({"values": torch.zeros(5, 64, 8)}, r"values: expected torch.float32 \(6, 64, 8\), got torch.float32 \(5, 64, 8\)"),
    ({"table": torch.zeros(2, 1, 3)}, r"table: expected torch.int32 \(2, 1, 3\), got torch.float32"),
    ({"first": torch.zeros(2, 2, dtype=torch.int32)}, r"first: expected torch.int32 \(2, 1\), got"),
    ({"length": torch.zeros(2)}, r"length: expected torch.int32 \(2,\), got torch.float32"),
    ({"page_sum": None}, r"page_sum: expected a tensor, got NoneType"),
    ({"log_decay": torch.zeros(2)}, r"log_decay: expected None with gates of each token, got a tensor"),
    ({"page_sum": torch.zeros(2, 2, 3)}, r"page_sum: expected torch.float64 \(2, 2, 3\), got torch.float32"),
    ({"first_visible": torch.zeros(2, 2, dtype=torch.int32)}, r"first_visible: expected torch.int32 \(2, 2, 2\), got"),
    ({"cu_seqlens": torch.zeros(2)}, r"cu_seqlens: expected None over pages"),
    ({"sink": torch.zeros(3)}, r"sink: expected a floating dtype \(2,\), got torch.float32 \(3,\)"),
    ({"window": 0}, r"window: expected at least 1"),
    ({"scale": -1.0}, r"scale: expected a positive finite number"),
    ({"first": None}, r"first: expected a tensor, got NoneType"),
    ({"impl": "tritn"}, r"impl: expected one of auto, .*got 'tritn'; did you mean 'triton'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:24] for _, m in BAD])
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    x = inputs(CASE, torch.float32)
    given = {"q": x.q, "impl": "auto", **x.pool}
    given |= {name: y.to(DEVICE) if torch.is_tensor(y) else y for name, y in change.items()}
    options = {name: given[name] for name in AttentionOptions._fields if name in given}
    with pytest.raises((ValueError, TypeError), match=message):
        attend(given["q"], given, given["impl"], **options)


@pytest.mark.parametrize(("change", "message"), [
    ({"log_decay": None}, r"gates: expected None without log_decay, got GateState"),
    ({"decay": None}, r"gates: expected GateState with log_decay, got None"),
    ({"n_log": None}, r"n_log: expected a tensor, got NoneType"),
    ({"k": torch.zeros(2, 2, 1, 4)}, r"k: expected torch.float32 \(2, 2, 1, 8\), got"),
    ({"k": torch.zeros(2, 17, 1, 8)}, r"k: expected 1 to 16 tokens, got T=17"),
    ({"keys": torch.zeros(6, 8)}, r"keys: expected \[P, PAGE, K\]"),
    ({"decay": torch.zeros(6, 128, 1)}, "decay: expected pages of at most 64 tokens .*, got 128"),
    ({"count": torch.zeros(2)}, r"count: expected torch.int32 \(2,\), got"),
    ({"log_decay": torch.full((2, 2, 2), 0.5)}, r"log_decay: expected natural logs <= 0, got 0.5"),
])  # fmt: skip
def test_wrong_appends_are_named(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNZOO_VALIDATE", "1")
    x = inputs(CASE, torch.float32)
    q, k, g = new_tokens(0)
    changed = {name: y.to(DEVICE) if torch.is_tensor(y) else y for name, y in change.items()}
    given: dict[str, Any] = {"k": k, "log_decay": g, "count": None, **state(CASE, x)} | changed
    with pytest.raises((ValueError, TypeError), match=message):
        paged_append(given["k"], k, state_of(given), log_decay=given["log_decay"], count=given["count"])


def test_gradients_are_refused_or_taken_from_the_reference() -> None:
    x = inputs(CASE, torch.float32)
    x.q.requires_grad_()
    with pytest.raises(ValueError, match=r"no gradient in the kernels: expected torch.no_grad\(\)"):
        ours(CASE, x)
    o = ours(CASE, x, "auto")
    within_budget(CASE, x, o.detach())
    assert torch.autograd.grad(o.sum(), x.q)[0].isfinite().all()


class Allocated(TorchDispatchMode):
    """Adds up the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in str(func) or "zeros" in str(func):
            self.bytes += out.numel() * out.itemsize
        return out


@pytest.mark.parametrize("carried", [0, 1, 2], ids=["", "pages", "groups"])
def test_the_workspace_of_a_step_is_known_beforehand(carried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    B, T, H, G, K, N = 2, 3, 4, 2, 16, 5
    table = torch.zeros(B, G, N, dtype=torch.int32)
    call = DecodeCall(T, H // G, 64, K, K, torch.float32, carried)
    expected = workspace(call, plan(call, 1), B * G, N)
    monkeypatch.setattr(page_shares, "paged_shares_kernel", Nothing())
    for name in ("paged_split_kernel", "paged_combine_kernel"):
        monkeypatch.setattr(attention, name, Nothing())
    monkeypatch.setattr(walks, "paged_carry_kernel", Nothing())
    q, x, pages = torch.zeros(B, T, H, K), torch.zeros(B, T, G, K), torch.zeros(1, 64, K)
    first, length = torch.zeros(B, G, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    opened = OpenGroup(torch.zeros(B, G, 64 * carried, K), torch.zeros(B, G, K, K), first[:, 0])
    kept = PagedState(KeyPages(pages, pages, q), PageTable(table, first, length))
    groups = PathGroups(torch.zeros(B, G, N, K, K), opened)
    given = walks.CarriedPages(PathTokens(x, x[..., None, :], x[..., :1]), kept, groups)
    with Allocated() as allocated:
        walked = walks.walk_and_carry(given, q, 1, 16) if carried else None
        inference = PagedInference(q, kept, None, None, None, OpOptions(None, None, 1.0))
        o = attention.paged_forward(inference, plan(call, 1), walked)
    assert allocated.bytes - o.nbytes == expected


class Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None
