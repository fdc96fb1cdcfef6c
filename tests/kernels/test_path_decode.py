"""Continuing from a cache: one token and chunks, against the float64 definition and the reference's own cache."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from named_ops import opcheck
from path_cases import DEVICE, Case, inputs
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from attnzoo import Gate, get
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.path import carry_keys, path_extend, path_step
from attnzoo.kernels.path import decode as path_decode
from attnzoo.kernels.path.operands import PathStep
from attnzoo.kernels.path.portable import decode
from attnzoo.kernels.path.reference import path_reference, path_reference_lse
from attnzoo.samples import random_inputs
from attnzoo.testing import in_float64

CASES = [
    (Case(T=70), (60, 1, 1, 8)),
    (Case(T=75, B=2, H=2, G=1, K=32, V=16, beta="two"), (70, 1, 3, 1)),
    (Case(T=50, H=3, G=3, K=16, V=48, gate="none"), (1, 1, 46, 2)),
    (Case(T=40, H=4, G=1, gate="shut"), (20, 19, 1)),
    (Case(T=40, H=4, G=2, K=8, V=8), (20, 1, 19)),
    (Case(T=40, gate="strong", beta="zero"), (38, 1, 1)),
    (Case(T=160, H=1, G=1), (10, 150)),  # more than one pass of 64 tokens
]


def parts(x: dict[str, Tensor], a: int, b: int) -> tuple[Tensor, ...]:
    return tuple(x[name][:, a:b] for name in ("q", "k", "w", "beta"))


def extend_in_pieces(
    x: dict[str, Tensor], pieces: tuple[int, ...], valid: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Outputs after the first piece, the keys at the end and, where asked for, the log-sum-exp."""
    t = pieces[0]
    _, k, w, beta = parts(x, 0, t)
    keys, outputs = carry_keys(k, w, beta, None if valid is None else valid[:, :t]), []
    for n in pieces[1:]:
        gates = None if "log_decay" not in x else x["log_decay"][:, : t + n]
        there = None if valid is None else valid[:, : t + n]
        o, keys, *lse = path_extend(*parts(x, t, t + n), keys, x["v"][:, : t + n], gates, there, **options)
        outputs.append((o, *lse))
        t += n
    o, *lse = (torch.cat(y, 1) for y in zip(*outputs, strict=True))
    return (o, keys, *lse)


def exact(x: dict[str, Tensor]) -> Tensor:
    wide = {name: t.double() for name, t in x.items() if name != "do"}
    return path_reference(wide.pop("q"), wide.pop("k"), wide.pop("v"), **wide)


@pytest.mark.parametrize(("case", "pieces"), CASES, ids=str)
def test_steps_and_chunks_equal_the_whole(case: Case, pieces: tuple[int, ...]) -> None:
    x = inputs(case, torch.float32)
    o, keys = extend_in_pieces(x, pieces)
    torch.testing.assert_close(o.double(), exact(x)[:, pieces[0] :], rtol=1e-5, atol=5e-6)
    want = carry_keys(x["k"].double(), x["w"].double(), x["beta"].double())
    torch.testing.assert_close(keys.double(), want, rtol=1e-5, atol=5e-6)


def test_carried_keys_are_those_of_the_reference() -> None:
    x = {n: t.double() for n, t in inputs(Case(T=200, B=2, H=4, G=2), torch.float32).items()}
    gate = Gate(log_decay=x["log_decay"], w=x["w"], beta=x["beta"])
    _, state = get("path_fox").extend(x["q"], x["k"], x["v"], gate)
    torch.testing.assert_close(carry_keys(x["k"], x["w"], x["beta"]), state.k, rtol=1e-12, atol=1e-12)


def test_shapes_alone_are_enough_to_carry_keys() -> None:
    k, beta = torch.empty(2, 5, 3, 16, device="meta"), torch.empty(2, 5, 3, device="meta")
    keys = carry_keys(k, k, beta)
    assert keys.is_meta
    assert keys.shape == k.shape


@pytest.mark.parametrize("pieces", [(9, 1, 1, 5), (15, 1)], ids=str)
def test_several_factors_per_token(pieces: tuple[int, ...]) -> None:
    """In single steps and in a chunk, and the keys that they leave."""
    q, k, v, gate = random_inputs("path_fox", 2, 16, 4, 2, 16, 16, factors=3, dtype=torch.float32)
    x = {"q": q, "k": k, "v": v, "w": gate.w, "beta": gate.beta, "log_decay": gate.log_decay}
    x = {name: t.to(DEVICE) for name, t in x.items()}  # type: ignore[union-attr]
    inputs = in_float64((q, k, v, gate))
    o, keys = extend_in_pieces(x, pieces)
    expected, state = get("path_fox").extend(*inputs)
    torch.testing.assert_close(o.double().cpu(), expected[:, pieces[0] :], rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(keys.double().cpu(), state.k, rtol=1e-5, atol=5e-6)


def test_keys_are_carried_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients do not depend on how many tokens are carried at a time."""
    x = {n: t.double() for n, t in inputs(Case(T=330, G=2, beta="two"), torch.float32).items()}
    leaves = [x[name].requires_grad_() for name in ("k", "w", "beta")]

    def both() -> tuple[Tensor, ...]:
        keys = carry_keys(*leaves)
        return keys, *torch.autograd.grad(keys.sin().sum(), leaves)

    whole = both()
    monkeypatch.setattr(path_decode, "SLAB", 128)
    for got, want in zip(both(), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [1, 5])
def test_split_keys_add_up(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many splits, with closed gates between and inside them, and the same bits every time."""
    case = Case(T=300, H=2, G=1)
    x = inputs(case, torch.float32)
    x["log_decay"][:, [130, 203]] = -math.inf
    x["log_decay"][:, 150:200] = 0.0
    monkeypatch.setattr(decode, "_splits", lambda S, *_: (-(-S // 64), 64))
    o, keys = extend_in_pieces(x, (300 - n, n))
    torch.testing.assert_close(o.double(), exact(x)[:, 300 - n :], rtol=1e-5, atol=5e-6)
    again, keys_again = extend_in_pieces(x, (300 - n, n))
    assert torch.equal(o, again)
    assert torch.equal(keys, keys_again)


def test_half_precision_values_and_a_scale() -> None:
    case = Case(T=90, H=4, G=2, K=16, V=32)
    x = inputs(case, torch.float16)
    o, _ = extend_in_pieces(x, (80, 1, 9), scale=0.7)
    wide = {name: t.double() for name, t in x.items() if name != "do"}
    want = path_reference(wide.pop("q"), wide.pop("k"), wide.pop("v"), scale=0.7, **wide)[:, 80:]
    assert o.dtype == torch.float16
    assert float((o.double() - want).norm() / want.norm()) <= 2 * torch.finfo(torch.float16).eps


OPTIONS = [
    (Case(T=80, sink=True), (60, 1, 1, 18), {"window": 17}),
    (Case(T=75, H=2, G=1, gate="none", sink=True), (40, 1, 34), {}),
    (Case(T=150, H=1, G=1, gate="open"), (10, 139, 1), {"window": 90}),
]


@pytest.mark.parametrize(("case", "pieces", "options"), OPTIONS, ids=str)
def test_window_sink_and_log_sum_exp(case: Case, pieces: tuple[int, ...], options: dict[str, int]) -> None:
    x = inputs(case, torch.float32)
    sink = x.pop("sink", None)
    o, keys, lse = extend_in_pieces(x, pieces, sink=sink, return_lse=True, **options)
    wide = {n: t.double() for n, t in x.items() if n != "do"}
    want = path_reference_lse(**wide, sink=None if sink is None else sink.double(), **options)
    for got, exact in zip((o, lse), want, strict=True):
        torch.testing.assert_close(got.double(), exact[:, pieces[0] :], rtol=1e-5, atol=5e-6)
    everything = carry_keys(x["k"].double(), x["w"].double(), x["beta"].double())
    torch.testing.assert_close(keys.double(), everything, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("n", [1, 5])
def test_keys_that_left_the_window_may_be_left_out(n: int) -> None:
    x = inputs(Case(T=90), torch.float32)
    keys = carry_keys(*parts(x, 0, 90 - n)[1:])
    whole = path_extend(*parts(x, 90 - n, 90), keys, x["v"], x["log_decay"], window=20)
    cut = 90 - n - 19  # the first new row sees itself and 19 keys before it
    short = path_extend(*parts(x, 90 - n, 90), keys[:, cut:], x["v"][:, cut:], x["log_decay"][:, cut:], window=20)
    torch.testing.assert_close(whole[0], short[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole[1][:, cut:], short[1], rtol=1e-5, atol=1e-6)  # a CPU's products differ in bits


@pytest.mark.parametrize("n", [1, 4])
def test_tokens_that_are_not_there(n: int) -> None:
    """Keys marked invalid are never attended to, cached or new, whatever their factors and gates; a row without any
    valid key is finite."""
    case = Case(T=70, B=2, H=2, G=1, gate="open")
    x = inputs(case, torch.float32)
    valid = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    valid[0, :20] = valid[0, 50:53] = valid[1, 66:] = False
    valid[1] = False
    for name, anything in (("beta", 1.5), ("log_decay", math.nan)):
        x[name] = x[name].masked_fill(~valid[..., None], anything)
    for name in ("w", "v"):
        x[name] = x[name].masked_fill(~valid[..., None, None], math.nan)
    o, keys = extend_in_pieces(x, (70 - n, n), valid=valid)
    there = {name: t[:1, valid[0]] for name, t in x.items()}
    torch.testing.assert_close(o[:1].double(), exact(there)[:, -n:], rtol=1e-5, atol=5e-6)
    assert bool(o.isfinite().all())
    assert bool(keys.isfinite().all())


def compiled_for(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a launch for: constants, launch options, and which integers are 1 or divisible by 16."""
    types, bound = inspect.get_annotations(kernel.fn), dict(zip(kernel.arg_names, args, strict=False)) | options
    free = kernel.kwargs["do_not_specialize"]
    numbers = {n: x for n, x in bound.items() if isinstance(x, int) and n not in free}
    fixed = {n: "constexpr" in types.get(n, "constexpr") for n in numbers}
    return tuple((n, x if fixed[n] else (x == 1, x % 16 == 0)) for n, x in numbers.items())


@pytest.mark.skipif(DEVICE != "cpu", reason="reads what the interpreter was asked for")
def test_the_length_of_a_chunk_is_no_reason_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the step of one token, a kernel is compiled once for each number of rows that a program may hold."""
    x = inputs(Case(T=100, H=2, G=1), torch.float32)
    valid, seen = torch.ones(1, 100, dtype=torch.bool), dict[str, set[Any]]()
    keys = carry_keys(*parts(x, 0, 36)[1:])
    for name in ("path_advance_kernel", "path_combine_kernel"):
        variants, kernel = seen.setdefault(name, set()), getattr(decode, name)

        def launch(grid: Any, kernel: Any = kernel, variants: set[Any] = variants) -> Any:
            return lambda *args, **options: variants.add(compiled_for(kernel, args, options))

        monkeypatch.setattr(decode, name, type("Recorder", (), {"__getitem__": lambda _, grid, f=launch: f(grid)})())
    for n in range(2, 65):
        v, gates, there = (y[:, : 36 + n].contiguous() for y in (x["v"], x["log_decay"], valid))
        path_extend(*parts(x, 36, 36 + n), keys, v, gates, there)
    assert len(seen["path_combine_kernel"]) == 1
    assert {dict(v)["BR"] for v in seen["path_advance_kernel"]} == {16, 32, 64}
    assert len(seen["path_advance_kernel"]) == 3


def test_nothing_that_is_given_is_changed() -> None:
    x = inputs(Case(T=40), torch.float32)
    _, k, w, beta = parts(x, 0, 38)
    keys = carry_keys(k, w, beta)
    before = [keys.clone(), *(t.clone() for t in x.values())]
    first, _ = path_extend(*parts(x, 38, 39), keys, x["v"][:, :39], x["log_decay"][:, :39])
    second, _ = path_extend(*parts(x, 38, 39), keys, x["v"][:, :39], x["log_decay"][:, :39])
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(before, [keys, *x.values()], strict=True))


def test_a_cache_may_be_strided() -> None:
    """As another engine left it: heads before tokens, values cut from wider rows, the rest transposed or spread."""
    x = inputs(Case(T=40, B=2, H=4, G=2), torch.float32)
    keys = carry_keys(*parts(x, 0, 38)[1:])
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.8
    sink = torch.randn(4, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:, 0]
    want = path_extend(*parts(x, 38, 40), keys, x["v"], x["log_decay"], valid, sink=sink.contiguous())
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    values = torch.cat([x["v"], x["v"]], 3)[..., :16]
    gates = x["log_decay"].transpose(1, 2).contiguous().transpose(1, 2)
    got = path_extend(*parts(x, 38, 40), turned, values, gates, valid.t().contiguous().t(), sink=sink)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_the_op_passes_its_checks() -> None:
    from attnzoo.kernels.path.portable.decode import path_advance_op

    x = inputs(Case(T=20), torch.float32)
    keys = carry_keys(*parts(x, 0, 18)[1:])
    sink = torch.zeros(2, device=DEVICE)
    step = PathStep(*parts(x, 18, 20), keys, x["v"], x["log_decay"], None, sink, None, OpOptions(None, None, 0.25, 9))
    opcheck(path_advance_op, step)


def test_a_step_compiles_as_one_graph_for_any_length() -> None:
    counter = CompileCounter()
    compiled = torch.compile(path_extend, fullgraph=True, dynamic=True, backend=counter)
    x = inputs(Case(T=40), torch.float32)
    with torch.no_grad():
        for t in (20, 25, 33):
            keys = carry_keys(*parts(x, 0, t)[1:])
            args = tuple(y.clone() for y in (*parts(x, t, t + 1), keys, x["v"][:, : t + 1], x["log_decay"][:, : t + 1]))
            for got, want in zip(compiled(*args), path_extend(*args), strict=True):
                assert torch.equal(got, want)
    assert counter.frame_count == 1


def test_a_gradient_is_refused() -> None:
    x = inputs(Case(T=20), torch.float32)
    keys = carry_keys(*parts(x, 0, 18)[1:])
    for name in ("log_decay", "q"):
        x[name].requires_grad_()
        with pytest.raises(ValueError, match="a cached step has no gradient"):
            path_extend(*parts(x, 18, 20), keys, x["v"], x["log_decay"])
        x[name].requires_grad_(False)


def test_roundings_of_a_cache_add_up() -> None:
    """Why cached keys are float32: rounded at every step, a 16-bit cache drifts with the number of steps."""
    x = {n: t.double() for n, t in inputs(Case(T=600, H=1, G=1, K=32, beta="two"), torch.float32).items()}
    drift = {}
    for dtype in (torch.float32, torch.bfloat16):
        key, errors = x["k"][0, 0, 0].to(dtype), []
        want = x["k"][0, 0, 0].clone()
        for t in range(1, 600):
            w, beta = x["w"][0, t, 0], x["beta"][0, t, 0]
            key = (key.double() - beta * (key.double() @ w) * w).to(dtype)
            want = want - beta * (want @ w) * w
            errors.append(float((key.double() - want).norm() / want.norm()))
        drift[dtype] = errors
    assert drift[torch.float32][-1] <= 1e-5
    assert drift[torch.bfloat16][-1] >= 4 * drift[torch.bfloat16][0]
    assert drift[torch.bfloat16][-1] >= 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 64])
def test_bf16_values_on_a_long_cache(n: int) -> None:
    case = Case(T=4000 + n, B=2, H=4, G=2, K=64, V=64, gate="open")
    x = inputs(case, torch.bfloat16)
    o, keys = extend_in_pieces(x, (4000, n))
    want = exact(x)[:, 4000:]
    assert float((o.double() - want).norm() / want.norm()) <= 2 * torch.finfo(torch.bfloat16).eps
    double = carry_keys(x["k"].double(), x["w"].double(), x["beta"].double())
    assert float((keys.double() - double).norm() / double.norm()) <= 1e-5


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("keys", lambda x: x[:, :0], r"keys: expected \[B, S >= 1, G, K\]"),
        ("keys", lambda x: x.half(), r"keys: expected float32"),
        ("values", lambda x: x[:, :-1], r"values: expected \(1, 40, 1, 16\)"),
        ("w", lambda x: x[..., :-1], r"w: expected \(1, 2, 1, 16\)"),
        ("gates", lambda x: x[..., :1], r"gates: expected \(1, 40, 2\)"),
        ("valid", lambda x: x.float(), r"valid: expected bool, got torch.float32"),
        ("window", lambda x: 0, r"window: expected at least 1"),
        ("sink", lambda x: x[:1], r"sink: expected \(2,\)"),
        ("q", lambda x: x[0], r"expected 4 dimensions each"),
        ("q", lambda x: x[:, :0], r"q: expected at least one new token"),
        ("w", lambda x: 2 * x, r"w: expected lengths of at most 1, got 2"),
        ("beta", lambda x: x - 3, r"beta: expected values in \[0, 2\]"),
        ("gates", lambda x: 0 * x + 0.5, r"gates: expected natural logs <= 0"),
        ("sink", lambda x: x + torch.inf, r"sink: expected logits that are finite or -inf"),
        ("scale", lambda x: math.nan, r"scale: expected a positive finite number"),
        ("values", lambda x: None, r"values: expected a tensor, got NoneType"),
        ("q", lambda x: x.double(), r"q: expected bfloat16, float16 or float32, got torch.float64"),
        ("k", lambda x: x.double(), r"k: expected bfloat16, float16 or float32, got torch.float64"),
        ("values", lambda x: x.double(), r"values: expected bfloat16, float16 or float32, got torch.float64"),
    ],
    ids=[
        "no keys",
        "half keys",
        "short values",
        "narrow w",
        "few gates",
        "float valid",
        "no window",
        "one sink",
        "flat q",
        "no token",
        "long w",
        "negative beta",
        "growing gates",
        "infinite sink",
        "nan scale",
        "missing values",
        "double q",
        "double k",
        "double values",
    ],
)
def test_wrong_cache_is_refused(name: str, change: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNZOO_VALIDATE", "1")  # on a GPU, too
    x = inputs(Case(T=40, H=2, G=1, K=16, V=16), torch.float32)
    q, k, w, beta = parts(x, 38, 40)
    call = {"q": q, "k": k, "w": w, "beta": beta, "keys": x["k"][:, :38], "values": x["v"], "gates": x["log_decay"]}
    call |= {
        "valid": torch.ones(1, 40, dtype=torch.bool, device=DEVICE),
        "window": 9,
        "sink": torch.zeros(2, device=DEVICE),
        "scale": None,
    }
    path_extend(**call)
    with pytest.raises((ValueError, TypeError), match=message):
        path_extend(**call | {name: change(call[name])})


def test_a_step_in_place_needs_keys() -> None:
    x = inputs(Case(T=8, H=1, G=1), torch.float32)
    with pytest.raises(TypeError, match="keys: expected a tensor, got NoneType"):
        path_step(*parts(x, 7, 8), None, x["v"])  # type: ignore[arg-type]


def test_no_kernel_runs_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {name: t.cpu() for name, t in inputs(Case(T=8, H=1, G=1), torch.float32).items()}
    keys = carry_keys(*parts(x, 0, 7)[1:])
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="q: expected CUDA tensors"):
        path_extend(*parts(x, 7, 8), keys, x["v"])
    with pytest.raises(ValueError, match="q: expected CUDA tensors"):
        path_step(*parts(x, 7, 8), torch.cat([keys, keys[:, :1]], 1), x["v"])


@pytest.mark.parametrize("channels", [False, True])
@torch.no_grad()
def test_a_token_that_does_not_exist_leaves_the_keys_of_a_step_alone(channels: bool) -> None:
    """As for ``path_extend``, whatever its factors hold."""
    B, S, G, K = 2, 5, 2, 16
    q, k, v = (torch.randn(B, S + 1, G, K, device=DEVICE) for _ in range(3))
    w = torch.nn.functional.normalize(torch.randn(B, S + 1, G, K, device=DEVICE), dim=-1)
    beta, a = torch.full((B, S + 1, G), 1.5, device=DEVICE), -torch.rand(B, S + 1, G, K, device=DEVICE)
    valid = torch.ones(B, S + 1, dtype=torch.bool, device=DEVICE)
    valid[0, -1] = False
    keys = carry_keys(k[:, :S], w[:, :S], beta[:, :S])
    w[0, -1] = beta[0, -1] = a[0, -1] = torch.nan
    new, given = [x[:, S:] for x in (q, k, w, beta)], {"log_diag": a[:, S:]} if channels else {}
    o, expected = path_extend(*new, keys, v, None, valid, **given)  # type: ignore[arg-type]
    room = torch.cat([keys, keys[:, :1]], 1)
    got = path_step(*new, room, v, None, valid, **given)  # type: ignore[arg-type]
    assert torch.equal(room[0, :S], keys[0])
    torch.testing.assert_close(room[:, :S], expected[:, :S])
    torch.testing.assert_close(got[1:], o[1:])
    with torch.enable_grad(), pytest.raises(ValueError, match="a cached step has no gradient"):
        path_extend(*new, keys, v, None, valid, log_diag=torch.zeros_like(a[:, S:]).requires_grad_())
