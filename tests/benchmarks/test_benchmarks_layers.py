"""Benchmarks of Wall and of layers of both sides: what is checked before it is timed, and their tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnzoo.benchmarks import attention, layers, measure, wall
from attnzoo.forms.backends import fla_tuning
from attnzoo.kernels.common.device import Machine
from attnzoo.kernels.fox import plan
from attnzoo.kernels.wall.reference import wall_reference
from attnzoo.registry import pairs


def test_wall_is_checked_against_float64_with_and_without_its_decays() -> None:
    def attend(name: str, leaves: str, power: float) -> attention.Contender:
        def call(x: attention.Inputs) -> torch.Tensor:
            return wall_reference(x.q, x.k, x.v, log_diag=power * x.a)

        return attention.Contender(name, call, leaves)

    x = wall.draw(1, 2, 64, 16, device="cpu")
    right = wall.errors(attend("right", "q k v a", 1), x)
    assert list(right) == [*wall.ERRORS]
    assert 0 < max(right.values()) < wall.LIMIT
    assert max(wall.errors(attend("half", "q k v a", 0.5), x).values()) > wall.LIMIT
    plain = wall.errors(attend("plain", "q k v", 0), x)
    assert list(plain) == ["o", "dq", "dk", "dv"]
    assert max(plain.values()) < wall.LIMIT
    assert max(wall.errors(attend("decays", "q k v", 1), x).values()) > wall.LIMIT


def test_wall_of_the_peer_runs_with_one_tile() -> None:
    pytest.importorskip("fla.ops.wall_attn")
    found, missing = wall.contenders()
    assert [peer.name for peer in found] == ["Wall", "FoX without a gate", "FLA Wall"]
    assert missing == []
    tiles = {
        name: len(tuner.configs)
        for name, tuner in fla_tuning.tuners()
        if tuner.base_fn.__module__.endswith("wall_attn.parallel")
    }
    assert tiles == {f"parallel_wall_attn_{part}": 1 for part in ("fwd_kernel", "bwd_kernel_dq", "bwd_kernel_dkv")}


def test_the_table_of_wall_has_its_ratios() -> None:
    shape = {"B": 2, "H": 24, "T": 16384, "K": 64, "forward_ms": 5.0, "extra_GiB": 1.5}
    times = {"Wall": 20.0, "FoX without a gate": 10.0, "FLA Wall": 50.0}
    result = {
        "machine": dict.fromkeys(("gpu", "torch", "triton", "fla", "date"), "x"),
        "missing": [],
        "matmul_tflops": 700.0,
        "copy_TBps": 4.0,
        "all_tiles": False,
        "errors": [{"name": "Wall", "K": 64, "o": "1e-3"}],
        "rows": [{"name": name, **shape, "both_ms": ms} for name, ms in times.items()],
    }
    lines = wall.table(result).splitlines()
    assert "FLA's kernels run with one of their tiles." in lines
    assert "| Wall | 5.00 | 20.00 | 2.50 | 2.00 | 1.50 |" in lines
    assert "| FoX without a gate | 5.00 | 10.00 | - | 1.00 | 1.50 |" in lines
    assert "| Wall | 64 | 1e-3 |" in lines
    alone = wall.table(result | {"missing": ["FLA: not installed"], "rows": result["rows"][:1], "all_tiles": True})  # type: ignore[index]
    assert "| Wall | 5.00 | 20.00 | - | - | 1.50 |" in alone
    assert "Not measured: FLA: not installed." in alone
    assert "the fastest of their tiles" in alone


@pytest.mark.filterwarnings("error")  # gates as in trained models are no start that went wrong
def test_layers_of_both_sides_are_checked_against_themselves_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    found = layers.contenders()
    assert [x.variant for x in found if not x.options] == [n for pair in pairs() for n in (pair.linear, pair.softmax)]
    assert [x.name for x in found if x.options and x.variant == "fox"] == [
        "fox + ACP", "fox, a window of 1024", "fox, One-Pass Forgetting, phase 1", "fox, One-Pass Forgetting, phase 2",
    ]  # fmt: skip
    x = layers.draw(1, 2, 32, 16, device="cpu")
    right = layers.errors(layers.TimedLayer("fox + ACP", "fox", {"acp": True}), x)
    assert list(right) == [*layers.ERRORS]
    assert 0 < max(right.values()) < 1
    build = layers.build

    def off(contender: layers.TimedLayer, x: layers.LayerInputs, impl: str = "auto") -> Any:
        layer = build(contender, x, impl)
        with torch.no_grad():
            layer.o_proj.weight.mul_(1.03 if impl == "auto" else 1)
        return layer

    monkeypatch.setattr(layers, "build", off)
    assert min(layers.errors(layers.TimedLayer("gla", "gla"), x).values()) > 1


def test_a_layer_that_leaves_something_out_does_so_in_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """FoX's kernels on a GPU look for what to prune in it, and a window is shorter than its texts."""
    shapes: list[tuple[int, int, int, int]] = []
    monkeypatch.setattr(layers, "draw", lambda *shape: shapes.append(shape))
    gpu = Machine((9, 0), (3, 6))
    for contender in layers.contenders():
        layers.checked(contender, 24, 64)
        B, H, T, K = shapes[-1]
        assert (B > 1) == contender.name.endswith(" + ACP")
        assert B == 1 or plan.searched((B, T, H, K), T, "tail", gpu)
        assert contender.options.get("window", 0) < T
    assert not plan.searched((1, 512, 24, 64), 512, "tail", gpu)


def test_an_error_in_one_row_of_a_layers_check_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    contender, x = layers.TimedLayer("fox + ACP", "fox", {"acp": True}), layers.draw(3, 2, 32, 16, device="cpu")
    assert max(layers.errors(contender, x).values()) < 1
    build = layers.build

    def off(contender: layers.TimedLayer, x: layers.LayerInputs, impl: str = "auto") -> Any:
        layer = build(contender, x, impl)
        if impl == "auto":
            layer.register_forward_hook(lambda *call: torch.cat([call[2][:2], 1.1 * call[2][2:]]))
        return layer

    monkeypatch.setattr(layers, "build", off)
    assert min(layers.errors(contender, x).values()) > 1


@pytest.mark.parametrize("phase", [1, 2])
def test_layers_that_forget_are_checked_and_timed_with_the_losses_of_their_network(
    monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    (contender,) = (x for x in layers.contenders() if x.name == f"rope, One-Pass Forgetting, phase {phase}")
    x = layers.draw(1, 2, 40, 16, device="cpu")
    assert 0 < max(layers.errors(contender, x).values()) < 1
    layer = layers.build(contender, x)
    layer(x.x)
    assert layer.forget is not None
    assert layer.forget.terms is not None
    assert (layer.forget.terms.distillation is not None) == (phase == 1)

    outcomes: list[Any] = []  # of the forward pass without gradients, and of all gradients

    def milliseconds(call: Callable[[], Any], rep: int) -> float:
        outcomes.append(call())
        return 1.0

    monkeypatch.setattr(measure, "milliseconds", milliseconds)
    monkeypatch.setattr(measure, "extra_memory", lambda *given: 0.0)
    row = layers.times(contender, x, 1)
    assert row == {"forward_ms": 1.0, "both_ms": 1.0, "extra_GiB": 0.0, "form": str(layer.picked).split()[0]}
    y, gradients = outcomes
    torch.testing.assert_close(y, layer(x.x.detach()))
    assert len(gradients) == 1 + len(list(layer.parameters()))


def test_the_table_of_layers_has_a_row_for_each_pair_that_was_measured() -> None:
    shape = {"B": 4, "H": 24, "T": 4096, "K": 64, "forward_ms": 5.0, "extra_GiB": 1.5, "form": "triton"}
    times = {"mamba2": 20.0, "fox": 10.0, "fox + ACP": 7.0, "gla": 4.0, "fox, a window of 1024": 3.0}
    result = {
        "machine": dict.fromkeys(("gpu", "torch", "triton", "fla", "date"), "x"),
        "errors": [{"name": "wall", "K": 64, "y": "1.2e+00", "dx": "5.0e-01"}],
        "rows": [{"name": name, **shape, "both_ms": ms} for name, ms in times.items()],
    }
    lines = layers.table(result).splitlines()
    rows = [line for line in lines if line.startswith("| ") and "softmax side" not in line]
    assert rows == [
        "| mamba2 | triton | 5.00 | 20.00 | fox | triton | 5.00 | 10.00 | 7.00 | 0.50 |",
        "| gla | triton | 5.00 | 4.00 | wall | - | - | - | - | - |",
        "| other layers | form | forward ms | both ms |",
        "| fox, a window of 1024 | triton | 5.00 | 3.00 |",
    ]
    assert lines[-1] == "Not right, and not timed: wall (y 1.2e+00)."
    failed = layers.table(result | {"errors": [], "missing": ["gla at (4, 24, 4096, 64): OSError()"]}).splitlines()
    assert failed[-2:] == [
        "Not measured: gla at (4, 24, 4096, 64): OSError().",
        "Every layer that was checked was within its error.",
    ]
