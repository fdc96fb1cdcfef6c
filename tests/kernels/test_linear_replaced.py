"""Kernels in place of flash-linear-attention's: against their definitions, and their place in its registry."""

from __future__ import annotations

import importlib.machinery
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from part_cases import ALSO_ON_A_GPU, DEVICE
from torch import Tensor

from attnzoo.forms.backends import fla_delta, fla_pairs
from attnzoo.kernels.common.recording import recorders
from attnzoo.kernels.linear import pair_backward
from attnzoo.kernels.linear.pair_backward import TILES, Pairs, PairTiles, pair_gradients
from attnzoo.testing import relative_error

pytestmark = ALSO_ON_A_GPU
NAMES = ("dq", "dk", "db", "dg")
SIZES = {fla_delta: (1, 2, 16, 16), fla_pairs: (1, 2, 16)}
REFUSED: dict[Any, dict[str, Any]] = {
    fla_delta: {"g": None, "w": None, "state_v_first": True, "chunk_size": 32, "q": torch.zeros(1, 3, 1, 16)},
    fla_pairs: {**dict.fromkeys(("g", "dAqk", "dAkk"), torch.zeros(1).half()), "chunk_size": 32, "use_graph": True},
}
of_each = pytest.mark.parametrize("module", SIZES, ids=lambda module: module.REPLACEMENT.name)


def there(x: dict[str, Any]) -> dict[str, Any]:
    return {name: y if y is None else y.to(DEVICE) for name, y in x.items()}


@pytest.mark.parametrize(("G", "H", "K", "V", "borders"), [(2, 2, 16, 24, [0, 70]), (1, 2, 72, 16, [0, 5, 5, 64, 199])])
def test_gradients_of_a_delta_rule_are_those_of_the_definition(
    G: int, H: int, K: int, V: int, borders: list[int]
) -> None:
    x = there(fla_delta.drawn((G, H, K, V), borders, torch.float16))
    found = fla_delta.gradients(**x, scale=0.3)
    for name, got, want in zip(("dq", "dk", "dw", "dg"), found, fla_delta.definition(x, 0.3), strict=True):
        assert relative_error(got, want) <= 3e-3, name
        assert got.dtype == (torch.float32 if name == "dg" else torch.float16)


def by_autograd(x: dict[str, Tensor]) -> list[Tensor]:
    """The definition once more: from sums over pairs of weights times their given gradients, by autograd in float64."""
    names = ("q", "k", "beta", "g")
    q, k, beta, g = leaves = [x[name][0].double().requires_grad_() for name in names]
    total, H, borders = torch.zeros((), dtype=torch.float64), g.shape[1], x["cu_seqlens"].tolist()
    q, k = (y.repeat_interleave(H // y.shape[1], 1) for y in (q, k))
    for n, i in x["chunk_indices"].tolist():
        for t in range(first := borders[n] + 64 * i, min(first + 64, borders[n + 1])):
            weights = (g[t] - g[first : t + 1]).exp2() * k[first : t + 1]  # [s, H, K]
            of_q, of_k = (x[name][0, t, :, : t + 1 - first].double().T for name in ("dAqk", "dAkk"))
            total = total + (of_q * (q[t] * weights).sum(-1)).sum()
            total = total + (of_k * beta[t] * (k[t] * weights).sum(-1))[:-1].sum()
    dq, dk, db, dg = torch.autograd.grad(total, leaves)
    found = [y.repeat_interleave(H // y.shape[1], 1) / (H // y.shape[1]) for y in (dq, dk)]
    return [y + x[name][0] for name, y in zip(NAMES, (*found, db, dg / math.log(2)), strict=True)]


@pytest.mark.parametrize("borders", [[0, 70], [0, 5, 5, 64, 150]])
@pytest.mark.parametrize("closed", [-115.0, -1.0])
@pytest.mark.parametrize(("R", "BK"), [(16, 64), (64, 16)])
def test_gradients_of_pairs_are_those_of_autograd(
    R: int, BK: int, closed: float, borders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With decays next to nothing and without, for channels of one block and of two."""
    monkeypatch.setattr(fla_pairs, "CLOSED", closed)
    x = fla_pairs.drawn((2, 2, 24), borders, torch.float16)
    assert (x["g"].amin() < -100) == (closed < -100)
    y, tiles = there(x), PairTiles(R, BK, 4, TILES.near)
    given = Pairs(*(y[name] for name in fla_pairs.ARGUMENTS))
    found = pair_gradients(given, y["cu_seqlens"], y["chunk_indices"], tiles)
    wanted, defined = by_autograd(x), fla_pairs.definition(x)
    for name, got, want, same in zip(NAMES, found, wanted, defined, strict=True):
        assert relative_error(got[0], want.to(DEVICE)) <= (1e-3 if DEVICE == "cuda" else 1e-6), name
        assert relative_error(same[0], want) <= 1e-9, name
        assert got.dtype == torch.float32


def assert_pairs(x: dict[str, Any], wanted: list[Tensor]) -> None:
    for name, got, want in zip(NAMES, fla_pairs.gradients(**there(x)), wanted, strict=True):
        assert relative_error(got.cpu(), want) <= 1e-3, name


@pytest.mark.parametrize("strided", [False, True])
def test_rows_of_a_batch_have_their_own_gradients(strided: bool) -> None:
    """Contiguous or not, before memory that is no number."""
    x = fla_pairs.drawn((1, 2, 16), [0, 70, 140], torch.float16)
    rows = {name: x[name].unflatten(1, (2, 70)).flatten(0, 1) for name in fla_pairs.ARGUMENTS}
    if strided:
        rows = {name: y.transpose(1, 2).contiguous().transpose(1, 2) for name, y in rows.items()}
    else:
        longer = {name: F.pad(y.flatten(), (0, y.numel()), value=math.nan) for name, y in rows.items()}
        rows = {name: longer[name][: y.numel()].view(y.shape) for name, y in rows.items()}
    for name, got, want in zip(NAMES, fla_pairs.gradients(**there(rows)), fla_pairs.definition(x), strict=True):
        assert relative_error(got.cpu().flatten(0, 1)[None], want) <= 1e-3, name


def test_heads_may_share_queries_and_keys() -> None:
    x = fla_pairs.drawn((1, 2, 16), [0, 3, 40], torch.float16)
    assert_pairs(x, fla_pairs.definition(x))


@pytest.mark.parametrize("unread", ["above", "beyond"])
def test_what_is_no_pair_is_not_read(unread: str) -> None:
    """Columns above a row's own, and of a chunk's tokens beyond the end."""
    x = fla_pairs.drawn((1, 1, 16), [0, 70], torch.float16)
    want = fla_pairs.definition(x)
    for t in range(70):
        own = t % 64 + 1
        for name, strict in (("dAqk", 0), ("dAkk", 1)):
            x[name][:, t, :, own - strict if unread == "above" else max(own, 6) :] = math.nan
    assert_pairs(x | {"cu_seqlens": None, "chunk_indices": None}, want)


def test_a_gate_that_opens_is_served() -> None:
    """Sums that grow, as no layer of ours makes them."""
    x = fla_pairs.drawn((1, 1, 16), [0, 64], torch.float16)
    x["g"] = -x["g"] / 20
    assert_pairs(x, fla_pairs.definition(x))


@pytest.fixture
def registered(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a stub of the library's registry is given."""
    found: list[Any] = []
    backends: Any = types.ModuleType("fla.backends")

    def register(operation: str) -> Callable[[Any], None]:
        return lambda backend: found.append((operation, backend))

    backends.BaseBackend, backends.register = type("BaseBackend", (), {"priority": 5}), register
    monkeypatch.setitem(sys.modules, "fla.backends", backends)
    operation = f"fla.ops.{module.REPLACEMENT.operation}"
    for name in ("fla", "fla.ops", operation, f"{operation}.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module.register.cache_clear()
    yield found
    module.register.cache_clear()


@of_each
def test_the_library_is_given_the_kernel_once_for_what_it_serves(
    module: Any, registered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.register()
    assert module.register()
    ((operation, backend),) = registered
    of = module.REPLACEMENT
    assert (operation, backend.backend_type) == (of.operation, "attnzoo")
    x = module.drawn(SIZES[module], [0, 3], torch.float16)
    ask = getattr(backend(), f"{of.name}_verifier")
    if module is fla_pairs and DEVICE == "cpu":
        assert not ask(**x)[0]
        monkeypatch.setattr(fla_pairs, "serves", lambda q: True)
    given = there(x)
    assert ask(**given, other=None) == (True, None)
    for name, wrong in REFUSED[module].items():
        assert not ask(**{**given, name: wrong})[0], name
    found = getattr(backend(), of.name)(**given, other=None)
    assert all(relative_error(a.cpu(), b) <= 3e-3 for a, b in zip(found, module.definition(x), strict=True))


@of_each
@pytest.mark.parametrize("installed", [True, False])
def test_the_kernel_comes_before_tilelangs_unless_the_owner_asks_for_those(
    module: Any, registered: list[Any], installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tilelang = types.ModuleType("tilelang")
    tilelang.__spec__ = importlib.machinery.ModuleSpec("tilelang", None)
    monkeypatch.setitem(sys.modules, "tilelang", tilelang if installed else None)
    assert module.register()
    ((_, backend),) = registered
    ours, others = backend(), sys.modules["fla.backends"].BaseBackend()

    def first() -> Any:
        return min(others, ours, key=lambda each: each.priority)

    for switch, wanted in ((None, ours), ("0", ours), ("1", others if installed else ours)):
        monkeypatch.delenv("FLA_TILELANG", raising=False)
        if switch is not None:
            monkeypatch.setenv("FLA_TILELANG", switch)
        assert first() is wanted


@of_each
def test_a_kernel_that_is_not_proven_for_these_heads_serves_none_of_them(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(fla_pairs, "serves", lambda q: True)
    monkeypatch.setattr(module, "proven", lambda *of: asked.append(of))
    x = module.drawn(SIZES[module], [0, 3], torch.float16)
    served, why = module.verified(**x)
    assert not served
    assert why == "expected a kernel that agrees with its definition"
    assert asked == [(SIZES[module], torch.float16, torch.device("cpu"))]


@pytest.mark.parametrize("hopper", [True, False])
def test_pairs_are_served_on_hopper_in_16_bits(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_pairs, "machine", lambda device: types.SimpleNamespace(hopper=hopper))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for is_cuda in (True, False):
            q: Any = types.SimpleNamespace(is_cuda=is_cuda, device="cuda", dtype=dtype)
            assert fla_pairs.serves(q) == (hopper and is_cuda and dtype != torch.float32)


def test_products_in_bf16x3_are_for_tritons_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_backward, "interpreted", lambda: False)
    for release, near in (((3, 5), "tf32x3"), ((3, 6), "bf16x3")):
        monkeypatch.setattr(pair_backward, "triton_version", lambda release=release: release)
        assert TILES.precision() == (near, "tf32")


@of_each
def test_the_library_says_which_chunks_packed_sequences_have(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = module.drawn(SIZES[module], [0, 5, 75], torch.float16)
    chunks = x.pop("chunk_indices")
    utils: Any = types.ModuleType("fla.ops.utils")
    utils.prepare_chunk_indices = lambda cu_seqlens, size: chunks.to(DEVICE) if size == 64 else None
    for name, library in (
        ("fla", types.ModuleType("fla")),
        ("fla.ops", types.ModuleType("fla.ops")),
        (utils.__name__, utils),
    ):
        monkeypatch.setitem(sys.modules, name, library)
    found = module.gradients(**there(x))
    for got, want in zip(found, module.definition(x), strict=True):
        assert relative_error(got.cpu(), want) <= 3e-3


@of_each
def test_all_forms_of_the_kernel_are_compiled_together(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared then, as nothing is computed."""
    packed: list[bool] = []

    def launch(**given: Any) -> None:
        packed.append(given["cu_seqlens"] is not None)

    monkeypatch.setattr(recorders, "compiles", True)
    of = replace(module.REPLACEMENT, kernel=launch)
    assert of.proven(SIZES[module], torch.float16, torch.device(DEVICE))
    assert packed == [True, False]


@of_each
def test_an_owner_who_wants_no_other_kernels_gets_none(
    module: Any, registered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert not module.register()
    assert not registered


@of_each
def test_the_proof_does_not_depend_on_the_default_device(module: Any) -> None:
    with torch.device("meta"):
        assert replace(module.REPLACEMENT).proven(SIZES[module], torch.float16, torch.device(DEVICE))


@of_each
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_a_kernel_is_taken_where_it_agrees_with_its_definition(
    module: Any, wrong: int | None, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def spoiled(**given: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = module.gradients(**given)
        if wrong is not None and (given["cu_seqlens"] is not None) == packed:
            found[wrong][:, 64:] *= 1.1
        return found

    sizes = SIZES[module]
    of = replace(module.REPLACEMENT, kernel=spoiled)
    assert of.proven(sizes, torch.float16, torch.device(DEVICE)) == (wrong is None)
    said = ", ".join(f"{name}={n}" for name, n in zip("GHKV", sizes, strict=False))
    assert (f"is miscompiled here for {said}" in caplog.text) == (wrong is not None)
