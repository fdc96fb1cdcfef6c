"""Benchmarks of FoX's and PaTH's kernels: how their peers are called, key heads that are shared, their tables."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnzoo import Gate, get
from attnzoo.benchmarks import attention, decode, fox, measure, path, wall
from attnzoo.forms.backends import fla_kernels
from attnzoo.kernels.fox.reference import fox_reference
from attnzoo.kernels.path.reference import path_reference

RESULTS = Path(__file__).parents[2] / "docs/benchmarks/results"


def test_what_a_captured_step_reads_lives_as_long_as_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keys:
        number = torch.ones(1)

    def made() -> tuple[decode.Step, weakref.ref[Keys]]:
        keys = Keys()
        return decode.captured(lambda: keys.number), weakref.ref(keys)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    replay, keys = made()
    assert keys() is not None
    assert replay() is Keys.number


def test_pruned_time_is_compared_with_what_is_kept() -> None:
    def row(name: str, both: float) -> dict[str, Any]:
        times = {"forward_ms": 1.0, "both_ms": both, "host_ms": 0.25, "both_tflops": 1, "of_matmul": 0.5}
        return {"name": name, "B": 1, "H": 2, "T": 4, "K": 8, "kept": {"paper": 0.5, "tail": 0.4}} | times

    rows = [row("ours", 10.0), row("ours, pruned (tail)", 4.6), row("FLA", 30.0)]
    table = fox.table(
        {"machine": measure.describe_versions(), "matmul_tflops": 1.0, "missing": [], "rows": rows, "errors": []}
    )
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| ")]
    assert cells[1][cells[0].index("of the host")] == "0.25"
    column = cells[0].index("over its share")
    assert [line[column] for line in cells[1:4]] == ["-", "1.150", "-"]  # 4.6 / (0.4 * 10)
    alone = fox.table(
        {"machine": measure.describe_versions(), "matmul_tflops": 1.0, "missing": [], "rows": rows[1:2], "errors": []}
    )
    assert "1.150" not in alone
    rows = [{name: value for name, value in row.items() if name != "kept"} for row in rows[:1]]
    unpruned = fox.table(
        {"machine": measure.describe_versions(), "matmul_tflops": 1.0, "missing": [], "rows": rows, "errors": []}
    )
    assert "### (B, H, T, K) = (1, 2, 4, 8)\n" in unpruned


def test_rows_of_a_race_say_what_the_peer_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their own calls, not while they were compared; and what the host alone takes is a column of every table."""
    ran: list[str] = []

    def taken() -> str:
        found = ", ".join(ran)
        ran.clear()
        return found

    def errors(peer: attention.Contender, H: int, K: int) -> dict[str, float]:
        ran.append("flash_qla")
        return {}

    def times(peer: attention.Contender, x: None) -> dict[str, float]:
        ran.extend(["tilelang"] if peer.name == "FLA PaTH" else [])
        return {"forward_ms": 1.0, "both_ms": 3.0, "host_ms": 0.5, "extra_GiB": 0.25}

    monkeypatch.setattr(fla_kernels, "taken", taken)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    result: dict[str, Any] = {"machine": measure.describe_versions(), "matmul_tflops": 1.0, "copy_TBps": 1.0}
    peers = [attention.Contender(name, lambda x: x.q) for name in ("PaTH", "FLA PaTH")]
    measure.race(
        result, peers, [(1, 2, 4, 8)], 60, draw=lambda *shape: None, errors=errors, limits={},
        common=lambda x: {"kept": 0.5}, times=times, keep=lambda result: None,
    )  # fmt: skip
    assert [row.get("fla") for row in result["rows"]] == [None, "tilelang"]
    for table in (path.table(result | {"decode": []}), wall.table(result | {"all_tiles": False})):
        assert "| fwd+bwd ms | of the host |" in table
        assert "| FLA PaTH (tilelang) | 1.00 | 3.00 | 0.50 |" in table
    assert {shape[2] for shape in path.SHAPES} >= {1024, 2048, 4096, 16384}


@pytest.mark.parametrize(("H", "shared"), [(4, 1), (4, 2), (6, 3)])
def test_kernels_that_cannot_share_keys_get_them_repeated(H: int, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same errors, and gradients of the heads that there are."""
    monkeypatch.setattr(fox, "draw", functools.partial(fox.draw, device="cpu"))
    heads: set[int] = set()

    def call(x: attention.Inputs, head_first: bool = False) -> torch.Tensor:
        q, k, v, g = (y.transpose(1, 2) if head_first else y for y in (x.q, x.k, x.v, x.g))
        heads.add(q.shape[2] // k.shape[2])
        o = fox_reference(q, k, v, log_decay=g)
        return o.transpose(1, 2) if head_first else o

    alone = attention.Contender("alone", functools.partial(call, head_first=True), head_first=True, shares=False)
    peers = (attention.Contender("shares", call), alone)
    found = [fox.errors(peer, H, 16, 64, kv_heads=H // shared) for peer in peers]
    assert heads == {1, shared}
    assert list(found[0]) == list(found[1]) == ["o", "dq", "dk", "dv", "dg"]
    for errors in found:
        assert all(error < fox.LIMITS[name] for name, error in errors.items())


def test_what_prunes_is_checked_with_as_many_texts_as_make_it_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them against float64, so that an error in one row is seen."""
    monkeypatch.setattr(fox, "draw", functools.partial(fox.draw, device="cpu"))
    monkeypatch.setattr(attention, "SEARCHED_WORK", 2.5 * 4 * 64 * 64 * 16)

    def call(x: attention.Inputs, wrong: int | None = None) -> torch.Tensor:
        o = fox_reference(x.q, x.k, x.v, log_decay=x.g)
        given.append(len(o))
        return o if wrong is None else torch.cat([o[:wrong], 2 * o[wrong : wrong + 1], o[wrong + 1 :]])

    for name, rows in (("ours", 1), ("ours, pruned (tail)", 3)):
        given: list[int] = []
        found = fox.errors(attention.Contender(name, call), 4, 16, 64)
        assert given == [rows]
        assert all(error < fox.LIMITS[each] for each, error in found.items())
        for row in range(rows):
            found = fox.errors(attention.Contender(name, functools.partial(call, wrong=row)), 4, 16, 64)
            assert found["o"] > fox.LIMITS["o"]
    assert path.texts_of(attention.Contender("FoX, pruned", call).prunes, 4, 64, 16) == 3


def test_inputs_with_shared_keys() -> None:
    x, y = fox.draw(1, 6, 8, 16, kv_heads=2, device="cpu"), path.draw(1, 6, 8, 16, kv_heads=2, device="cpu")
    assert [t.shape[2] for t in (x.q, x.k, x.v, x.g, x.do)] == [6, 2, 2, 6, 6]
    assert [t.shape[2] for t in (y.q, y.k, y.v, y.w, y.beta, y.g, y.do)] == [6, 2, 2, 2, 2, 6, 6]
    assert torch.equal(fox.draw(1, 6, 8, 16, device="cpu").k, fox.draw(1, 6, 8, 16, kv_heads=6, device="cpu").k)


def test_paths_errors_with_shared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "draw", functools.partial(path.draw, device="cpu"))
    heads: list[int] = []

    def call(x: attention.Inputs) -> torch.Tensor:
        heads.append(x.k.shape[2])
        return path_reference(x.q, x.k, x.v, w=x.w, beta=x.beta, log_decay=x.g)

    errors = path.errors(attention.Contender("PaTH-FoX", call, "q k v w beta g"), 6, 16, 64, kv_heads=2)
    assert heads == [2]
    assert set(errors) == set(path.ERRORS)
    assert max(errors.values()) < path.LIMIT


def test_tables_name_the_key_heads() -> None:
    for module in (fox, path):
        folder = next(
            each for each in sorted(RESULTS.iterdir()) if each.name.endswith(module.__name__.rpartition(".")[2])
        )
        result = json.loads((folder / "results.json").read_text())
        shape = tuple(result["rows"][0][n] for n in "BHTK")
        assert f"### (B, H, T, K) = {shape}; " in module.table(result)
        assert f"### (B, H, T, K) = {shape}, 4 key and value heads; " in module.table(result | {"kv_heads": 4})
        assert ("repeats k and v" in module.table(result | {"kv_heads": 4})) == (module is fox)


def test_gates_in_keys_have_the_gradient_of_16_bits_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fox, "draw", functools.partial(fox.draw, device="cpu"))
    form = get("fox").forms["sdpa"]
    peer = attention.Contender(f"SDPA, {fox.IN_KEYS}", lambda x: form(x.q, x.k, x.v, Gate(log_decay=x.g)))
    found = fox.errors(peer, 4, 16, 256)
    assert list(found) == ["o", "dq", "dk", "dv", fox.IN_16_BITS]
    assert all(error <= fox.LIMITS[name] for name, error in found.items()), found


def test_fox_by_the_gates_of_flash_sparse_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the logits that it documents, scale (q k + alpha delta), and nothing skipped unless asked for."""
    asked: list[dict[str, Any]] = []

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, delta: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        asked.append(how)
        alpha, delta = alpha.transpose(1, 2), delta.transpose(1, 2)
        s = (torch.einsum("bihk,bjhk->bhij", q, k) + alpha[..., :, None] * delta[..., None, :]) * q.shape[-1] ** -0.5
        seen = torch.ones(s.shape[-2:]).tril().bool()
        return torch.einsum("bhij,bjhv->bihv", s.masked_fill(~seen, float("-inf")).softmax(-1), v)

    name = "flash_sparse_attn"
    modules = {
        part: ModuleType(part)
        for part in (name, f"{name}.ops", f"{name}.ops.triton", f"{name}.ops.triton.launch_template")
    }
    for part, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(part, None, is_package=True)
        monkeypatch.setitem(sys.modules, part, module)
    for part in ("fwd", "bwd"):
        monkeypatch.setitem(sys.modules, f"{name}.ops.triton.flash_proj_{part}", ModuleType("unused"))
    modules[name].flash_gated_attn_func = attend  # type: ignore[attr-defined]
    call = fox.flash_sparse()

    q, k, v = torch.randn(3, 1, 20, 2, 16).unbind()
    x = attention.Inputs(q, k, v, v, -torch.rand(1, 20, 2))
    torch.testing.assert_close(call(x, 0.0), fox_reference(q, k, v, log_decay=x.g))
    call(x, None)
    common = {"is_causal": True, "is_logsigmoid_gate": False}
    assert asked == [{**common, "softmax_threshold": t, "gate_threshold": t} for t in (0.0, None)]
    tiles = modules[f"{name}.ops.triton.launch_template"].load_launch_config
    assert [len(tiles(kernel_name=kernel, seqlen_q=1)) for kernel in ("fwd_gated", "bwd_gated")] == [5, 5]


def test_rows_of_the_peer_say_whose_kernels_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TileLang installed it is the peer's default on Hopper: its Triton kernels have a row of their own."""
    ran: list[str | None] = []

    def parallel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        ran.append(os.environ.get("FLA_TILELANG"))
        return v

    class TileLangBackend:
        nvcc = True

        @classmethod
        def is_available(cls) -> bool:
            return cls.nvcc

    monkeypatch.setenv("FLA_TILELANG", "")
    modules = {name: ModuleType(name) for name in ("fla", "fla.backends", "fla.ops.forgetting_attn", "tilelang")}
    modules["fla.ops.forgetting_attn"].parallel_forgetting_attn = parallel  # type: ignore[attr-defined]
    modules["fla.backends"].TileLangBackend = TileLangBackend  # type: ignore[attr-defined]
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    found = {one.name: one for one in fox.contenders(None)[0]}
    q, k, v, do = torch.randn(4, 1, 20, 2, 16).unbind()
    x = attention.Inputs(q, k, v, do, -torch.rand(1, 20, 2))
    registries = [SimpleNamespace(_logged=noted) for noted in ({"attn:fwd:tilelang", "attn:bwd:flash_qla:fail"}, set())]
    modules["fla.backends"]._operation_registries = dict(enumerate(registries))  # type: ignore[attr-defined]
    assert (fla_kernels.taken(), fla_kernels.taken()) == ("tilelang", "")
    for name in ("FLA", "FLA, TileLang", "FLA"):
        found[name].attend(x)
    assert ran == ["0", "1", "0"]
    monkeypatch.setenv("FLA_TILELANG", "")
    assert fla_kernels.described("0.6.0") == "0.6.0 with tilelang (FLA_TILELANG=0 switches it off)"
    monkeypatch.setattr(TileLangBackend, "nvcc", False)
    assert "FLA, TileLang: RuntimeError('flash-linear-attention finds no nvcc for it')" in fox.contenders(None)[1]
    monkeypatch.setitem(sys.modules, "tilelang", None)
    assert any(line.startswith("FLA, TileLang: not installed") for line in fox.contenders(None)[1])
    monkeypatch.delitem(sys.modules, "tilelang")
    assert fla_kernels.described("0.6.0") == "0.6.0"


def test_flash_sparse_attn_that_is_not_installed_is_named() -> None:
    if importlib.util.find_spec("flash_sparse_attn") is not None:
        pytest.skip("flash-sparse-attn is installed")
    missing: list[str] = []
    assert measure.load_peer("flash-sparse-attn", fox.flash_sparse, missing) is None
    assert missing == ["flash-sparse-attn: not installed (No module named 'flash_sparse_attn')"]


def test_the_plot_shows_what_was_asked_for_and_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [attention.Contender(name, lambda x: x.q) for name in ("ours", "official", "FLA")]
    pictured: list[dict[str, Any]] = []
    fakes: dict[str, Any] = {
        "ceiling": lambda: 1.0,
        "race": lambda result, *given, **options: result.update(rows=[{"name": "ours", "K": 64}]),
        "contenders": lambda official: (peers, []),
        "draw": lambda *shape: None,
        "time_peer": lambda peer, x, rep: (1.0, 2.0),
        "table": lambda result: "",
        "draw_lengths": lambda result, out: pictured.extend(result["lengths"]),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(fox, name, fake)
    fox.run(tmp_path, [], ["ours", "official"], 1, 60.0, None, plot=True)
    assert {row["name"] for row in pictured} == {"ours"}  # the official kernel was not right
