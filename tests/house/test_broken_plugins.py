"""A variant of another package that cannot be imported, or has no layer of its own, stops nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from attnzoo import Pair, build_attention, describe, doctor, register, verify
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.errors import UnavailableError
from attnzoo.forms.linear import LinearForms
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.registry import unregister

PRUNABLE = ("log_decay", "log_diag")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A pair whose linear side has a module that is not there, and whose softmax side one without FORMS."""
    monkeypatch.setitem(sys.modules, "formless", ModuleType("formless"))
    pair = Pair("lost_linear", "lost_softmax", PRUNABLE, linear_module="no_such_file", softmax_module="formless")
    register(pair)
    yield "lost_linear"
    unregister(pair)


@pytest.fixture
def without_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A pair whose modules have FORMS alone, as they may."""
    linear, softmax = ModuleType("bare_linear"), ModuleType("bare_softmax")
    linear.FORMS, softmax.FORMS = LinearForms(Diagonal()), SoftmaxForms(Diagonal())  # type: ignore[attr-defined]
    for module in (linear, softmax):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    pair = Pair(
        "bare_linear", "bare_softmax", ("log_diag",), linear_module="bare_linear", softmax_module="bare_softmax"
    )
    register(pair)
    yield "bare_linear"
    unregister(pair)


def test_errors_list_the_variants_that_can_be_imported(broken: str) -> None:
    with pytest.raises(ValueError, match=r"acp: 'rope' has no scalar decay .*\(it serves alibi, fox, path_fox"):
        build_attention("rope", hidden_size=8, num_heads=1, acp=True)
    with pytest.raises(ValueError, match=r"evict: 'rope' needs all its keys: .*\(it serves alibi, fox"):
        build_attention("rope", hidden_size=8, num_heads=1).new_cache(evict=1e-4)


def test_all_others_are_verified(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["nope", broken, "lost_softmax", "alibi"]
    monkeypatch.setattr("attnzoo.verify.list_variants", lambda side=None: names if side is None else [])
    checks = list(verify.verify(where=verify.Where(examples=1)))
    found = {check.variant: check.said for check in checks if not check.ok}
    assert found.keys() == {broken, "lost_softmax"}
    assert "its module 'no_such_file' cannot be imported" in found[broken]
    assert "expected an object FORMS" in found["lost_softmax"]
    assert {check.variant for check in checks if check.ok} == {"nope", "alibi"}
    with pytest.raises(UnavailableError, match="no_such_file"):
        next(verify.verify([broken]))


def test_the_doctor_sees_all_others(broken: str, without_layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "list_variants", lambda side=None: [] if side else ["nope", broken, without_layer])
    rows = {row.variant: row for row in doctor.examine().rows}
    assert rows["nope"].form == "reference"
    assert [rows[name].form for name in (broken, without_layer)] == ["nothing", "nothing"]
    assert "no_such_file" in rows[broken].why[0]
    assert "needs the parts log_diag; 'none' provides none" in rows[without_layer].why[0]
    assert "nothing" in doctor.examine().text()


def test_a_layer_without_defaults_is_not_shown_as_one_of_projections_alone(without_layer: str) -> None:
    shown = describe(without_layer)
    assert "layer       none by default: build_attention takes gate=..." in shown
    assert "projections alone" in describe("nope")
