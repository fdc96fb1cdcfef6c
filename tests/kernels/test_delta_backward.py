"""Gradients of a gated delta rule's chunks: the kernel against the definition, and its place in the peer's registry."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo.forms.backends import fla_mended
from attnzoo.testing import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("G", "H", "K", "V", "borders"), [(2, 2, 16, 24, [0, 70]), (1, 2, 72, 16, [0, 5, 5, 64, 199])])
def test_gradients_are_those_of_the_definition(G: int, H: int, K: int, V: int, borders: list[int]) -> None:
    x = {name: y.to(DEVICE) for name, y in fla_mended.drawn((G, H, K, V), borders, torch.float16).items()}
    found = fla_mended.gradients(**x, scale=0.3)
    for name, got, want in zip(("dq", "dk", "dw", "dg"), found, fla_mended.definition(x, 0.3), strict=True):
        assert relative_error(got, want) <= 3e-3, name
        assert got.dtype == (torch.float32 if name == "dg" else torch.float16)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a stub of the peer's registry is given."""
    found: list[Any] = []
    backends: Any = types.ModuleType("fla.backends")

    class BaseBackend:
        priority = 5

    def register(operation: str) -> Callable[[Any], None]:
        return lambda backend: found.append((operation, backend))

    backends.BaseBackend, backends.register = BaseBackend, register
    for name, module in (("fla", types.ModuleType("fla")), ("fla.backends", backends)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("fla.ops", "fla.ops.common", "fla.ops.common.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    fla_mended.register.cache_clear()
    yield found
    fla_mended.register.cache_clear()


def test_the_peer_is_given_the_kernel_once_and_asks_it_last(registered: list[Any]) -> None:
    assert fla_mended.register()
    assert fla_mended.register()
    ((operation, backend),) = registered
    assert (operation, backend.backend_type) == ("common", "attnzoo")
    assert backend.priority > 5
    x = fla_mended.drawn((1, 1, 16, 16), [0, 3], torch.float16)
    assert backend().chunk_bwd_dqkwg_verifier(**x, scale=1.0) == (True, None)
    for wrong in ({"g": None}, {"w": None}, {"state_v_first": True}, {"chunk_size": 32}, {"q": x["q"].float()}):
        assert not backend().chunk_bwd_dqkwg_verifier(**(x | wrong))[0]


def test_an_owner_who_wants_no_other_kernels_gets_none(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert not fla_mended.register()
    assert not registered


def test_the_proof_does_not_depend_on_the_default_device() -> None:
    fla_mended._proven.cache_clear()
    with torch.device("meta"):
        assert fla_mended.proven((1, 2, 16, 16), torch.float16, torch.device(DEVICE))


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_a_kernel_is_taken_where_it_agrees_with_its_definition(
    wrong: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = fla_mended.gradients

    def spoiled(**given: Any) -> tuple[Tensor, ...]:
        found = run(**given)
        if wrong is not None and given["cu_seqlens"] is None:
            found[wrong][:, 64:] *= 1.1
        return found

    monkeypatch.setattr(fla_mended, "gradients", spoiled)
    fla_mended._proven.cache_clear()
    assert fla_mended.proven((1, 2, 16, 16), torch.float16, torch.device(DEVICE)) == (wrong is None)
    assert ("is miscompiled here for G=1, H=2, K=16, V=16" in caplog.text) == (wrong is not None)
    fla_mended._proven.cache_clear()
