"""Both ops under torch.library's checks, torch.compile and CUDA graphs; the public functions' errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_cases import Case, inputs, ours, within_budget
from fox_cases import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo.kernels.decode import paged_append, paged_attention
from attnzoo.kernels.decode.plan import Call, plan, workspace
from attnzoo.kernels.decode.portable import attention, page_shares
from attnzoo.kernels.decode.portable import path_pages as walks

CASE = Case(lengths=(70, 5), T=2, H=2, G=1, K=8, V=8, sink=True)


def state(case: Case, x: Any) -> dict[str, torch.Tensor]:
    """What ``paged_append`` takes besides the pages, of no meaning."""
    B, G, N = x.pool["table"].shape
    pool = {"keys": x.pool["k"], "values": x.pool["v"], "table": x.pool["table"], "length": x.pool["length"].clone()}
    pool |= {name: x.pool[name].nan_to_num() for name in ("decay", "page_sum")}
    pool |= {"k_norm": torch.zeros(B, G, N), "total": torch.zeros(B, case.H, dtype=torch.float64)}
    pool |= {"since": torch.zeros(B, case.H, dtype=torch.int32), "n_log": pool["page_sum"] * 0}
    pool["closed"] = pool["n_log"].long()
    return {name: y.to(DEVICE) for name, y in pool.items()}


def test_opcheck() -> None:
    from attnzoo.kernels.decode.op import paged_infer_op, paged_write_op

    x = inputs(CASE, torch.float32)
    pool = [x.pool[name] for name in ("k", "v", "table", "first", "length", "decay", "page_sum", "since")]
    torch.library.opcheck(paged_infer_op, (x.q, *pool, None, x.sink, None, None, None, 0.3, 40, 0.0))
    names = ("keys", "values", "table", "length", "k_norm", "decay", "page_sum", "total", "since", "n_log", "closed")
    kept = state(CASE, x)
    new = (x.k[:, :2], x.v[:, :2], torch.zeros(2, 2, 2, device=DEVICE), None)
    torch.library.opcheck(paged_write_op, (*new, *(kept[name] for name in names)))


def step(x: Any, kept: dict[str, torch.Tensor], q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    seen = paged_append(k, k, log_decay=g, impl="triton", **kept)  # type: ignore[arg-type]
    return paged_attention(
        q, kept["keys"], kept["values"], kept["table"], x.pool["first"], kept["length"], decay=kept["decay"],
        page_sum=kept["page_sum"], since=seen, impl="triton",
    )  # fmt: skip


def new_tokens(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, 2, n, 8, generator=generator).to(DEVICE) for n in (2, 1))
    return [q, k, -torch.rand(2, 2, 2, generator=generator).to(DEVICE)]


def test_autocast_does_not_reach_inside_the_reference() -> None:
    x = inputs(CASE, torch.float32)
    pages = [x.pool[name].to(DEVICE) for name in ("k", "v", "table", "first", "length")]
    want = paged_attention(x.q, *pages, impl="reference")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(paged_attention(x.q, *pages, impl="reference"), want)


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
            x.pool["first"][0] = 1
        graph.replay()
        assert torch.equal(o, step(x, kept[1], *new))
    assert kept[0]["length"].tolist() == [130, 70]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(2, 2, 2)}, r"q: expected \[B, T, heads, dim\], got shape \(2, 2, 2\)"),
    ({"q": torch.zeros(2, 17, 2, 8)}, r"q: expected 1 to 16 tokens, got T=17"),
    ({"q": torch.zeros(3, 2, 2, 8)}, r"table: expected \[B=3, G, N\], got \(2, 1, 3\)"),
    ({"k": torch.zeros(6, 48, 8)}, r"k: expected \[P, PAGE, K\], PAGE a power of 2 from 16 on, got \(6, 48, 8\)"),
    ({"k": torch.zeros(6, 64, 16)}, r"k: expected torch.float32 \[P, PAGE, K=8\] as in q, got"),
    ({"k": torch.zeros(6, 8, 64).mT}, r"k: expected a contiguous tensor"),
    ({"v": torch.zeros(5, 64, 8)}, r"v: expected torch.float32 \(6, 64, 8\), got torch.float32 \(5, 64, 8\)"),
    ({"table": torch.zeros(2, 1, 3)}, r"table: expected torch.int32 \(2, 1, 3\), got torch.float32"),
    ({"first": torch.zeros(2, 2, dtype=torch.int32)}, r"first: expected torch.int32 \(2, 1\), got"),
    ({"length": torch.zeros(2)}, r"length: expected torch.int32 \(2,\), got torch.float32"),
    ({"page_sum": None}, r"decay: expected decay and page_sum, or log_decay, or none of the three"),
    ({"log_decay": torch.zeros(2)}, r"decay: expected decay and page_sum, or log_decay, or none"),
    ({"page_sum": torch.zeros(2, 2, 3)}, r"page_sum: expected torch.float64 \(2, 2, 3\), got torch.float32"),
    ({"since": torch.zeros(2, 2, dtype=torch.int32)}, r"since: expected torch.int32 \(2, 2, 2\), got"),
    ({"sink": torch.zeros(3)}, r"sink: expected a floating dtype \(2,\), got torch.float32 \(3,\)"),
    ({"window": 0}, r"window: expected at least 1"),
    ({"scale": -1.0}, r"scale: expected a positive finite number"),
    ({"first": None}, r"first: expected a tensor, got NoneType"),
    ({"impl": "cuda"}, r"impl: expected one of"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:24] for _, m in BAD])
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    x = inputs(CASE, torch.float32)
    given = {"q": x.q, **x.pool} | {name: y.to(DEVICE) if torch.is_tensor(y) else y for name, y in change.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        paged_attention(**given)


@pytest.mark.parametrize(("change", "message"), [
    ({"log_decay": None}, r"decay: expected None without log_decay"),
    ({"n_log": None}, r"n_log: expected a tensor with log_decay"),
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
    with pytest.raises(ValueError, match=message):
        paged_append(**{"k": k, "v": k, "log_decay": g, **state(CASE, x)} | changed)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("carried", [0, 1, 2], ids=["", "carried", "groups"])
def test_the_workspace_of_a_step_is_known_beforehand(carried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    B, T, H, G, K, N = 2, 3, 4, 2, 16, 5
    table = torch.zeros(B, G, N, dtype=torch.int32)
    call = Call(T, H // G, 64, K, K, torch.float32, carried)
    expected = workspace(call, plan(call, 1), B * G, N)
    monkeypatch.setattr(page_shares, "paged_shares_kernel", Nothing())
    for name in ("paged_split_kernel", "paged_combine_kernel"):
        monkeypatch.setattr(attention, name, Nothing())
    monkeypatch.setattr(walks, "paged_carry_kernel", Nothing())
    q, x, pages = torch.zeros(B, T, H, K), torch.zeros(B, T, G, K), torch.zeros(1, 64, K)
    first, length = torch.zeros(B, G, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    opened = (torch.zeros(B, G, 64 * carried, K), torch.zeros(B, G, K, K), first[:, 0]) if carried > 1 else None
    given = walks.Carried(x, x[..., None, :], x[..., :1], pages, torch.zeros(1, K, K), opened, None, None)
    with Allocated() as allocated:
        walked = walks.walk_and_carry(given, q, table, first, length, q, 1, 16) if carried else None
        o = attention.paged_forward(
            q, pages, pages, table, first, length, None, None, None, None, None, None, None, None, 1.0, 0, 0.0,
            plan(call, 1), walked,
        )  # fmt: skip
    assert allocated.bytes - o.nbytes == expected


class Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None
