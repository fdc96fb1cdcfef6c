"""The laws for everybody: they find what is wrong in a transition of one's own, make it small, and can be repeated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attnzoo.files
import attnzoo.testing
from attnzoo import Pair, get, register
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import ClosedForm, HeadGate, Product, Transition
from attnzoo.errors import UnavailableError
from attnzoo.recurrences.deltanet import Householder
from attnzoo.registry import FILES, from_file, unregister
from attnzoo.testing import LAWS, PROFILES, BrokenLawError, Case, check, run_law

NAMES = ("planted", "planted_path")


class Planted(Transition):
    """``R_t = H_t D_t H_t``, with a wrong sign in one member of its closed form."""

    parts = ("log_diag", "w", "beta")
    right = Product(Householder(), Diagonal(), Householder())

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return -self.right.apply(gate, state) if self.wrong == "apply" else self.right.apply(gate, state)

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        form = self.right.block(q, k, gate)
        if self.wrong in ("", "apply"):
            return form
        sign = -torch.ones_like(form.scores) + 2 * torch.eye(q.shape[-2], dtype=q.dtype)
        return replace(form, **{self.wrong: getattr(form, self.wrong) * (sign if self.wrong == "scores" else -1)})

    def carry(self, total: Tensor | None, state: Tensor) -> Tensor:
        return self.right.carry(total, state)


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> Iterator[str]:
    wrong = getattr(request, "param", "")
    register(pair := Pair(*NAMES, ("log_diag", "w", "beta"), transition=Planted(wrong)))
    yield wrong
    unregister(pair)


@pytest.mark.parametrize("planted", ["scores", "q", "k", "total", "apply"], indirect=True)
def test_a_wrong_sign_is_found_and_shrunk_to_three_tokens(planted: str) -> None:
    trial = run_law("planted", "oracle", 30)
    assert not trial.ok
    assert trial.case is not None
    assert trial.case.T <= 3
    assert max(trial.worst.values()) > trial.budget  # the table of `attnzoo verify` shows what broke it
    with pytest.raises(BrokenLawError, match="'planted' breaks the law 'oracle'"):
        eval(trial.said.rpartition("import Case, check; ")[2], {"Case": Case, "check": check})


IN_A_FILE = """
from attnzoo import Pair, register
from attnzoo.algebra.transitions import Transition

class Shrunk(Transition):
    symbol = "Diag(exp(a_t))"

    def apply(self, gate, state):
        return gate.log_diag.exp()[..., None] * state

    def carry(self, total, state):
        return 0.9 * super().carry(total, state)

register(Pair("filed", "filed_path", ("log_diag",), transition=Shrunk()))
"""


def test_the_call_that_repeats_a_failure_runs_the_file_of_the_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILES, "")
    monkeypatch.chdir(tmp_path)
    Path("filed.py").write_text(IN_A_FILE)
    from_file("filed.py")
    said = run_law("filed", "oracle", 10).said
    unregister(get("filed").pair)
    attnzoo.files._run_file.cache_clear()  # as in another process
    call = said.rpartition("import Case, check; ")[2]
    assert call.endswith(", 'filed.py')")
    with pytest.raises(ValueError, match="unknown variant 'filed'"):
        eval(call.replace(", 'filed.py'", ""), {"Case": Case, "check": check})
    with pytest.raises(BrokenLawError, match="'filed' breaks the law 'oracle'"):
        eval(call, {"Case": Case, "check": check})
    unregister(get("filed").pair)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("name", NAMES)
def test_a_transition_of_ones_own_obeys_every_law(name: str) -> None:
    trials = {law: run_law(name, law, 2, seed=1) for law in LAWS}
    assert [trial.said for trial in trials.values() if not trial.ok] == []
    refused = {law: trial.refused for law, trial in trials.items() if trial.refused}
    assert refused["matrices"] == "R_t = Planted_t, not the product of its parts' factors"
    assert refused.keys() == {"matrices", "pruning"}
    assert all(trial.worst for law, trial in trials.items() if law not in refused)


def test_pruning_is_measured_where_something_is_dropped() -> None:
    assert 0 < check("pruning", Case("fox", T=150, regime="open", block=8))["parallel"] <= LAWS["pruning"].budget


class Seen:
    """What pytest reports of each test."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.reports.append(report)


@pytest.mark.parametrize("planted", ["", "scores"], indirect=True)
def test_three_lines_are_the_battery_of_a_variant(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_planted.py").write_text("from attnzoo.testing import battery\n\ntest_laws = battery('planted')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROFILES, "thorough", 3)  # 200 would take long
    given = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
    installed = any(point.name == "attnzoo" for point in entry_points(group="pytest11"))
    loaded = [] if installed else ["-p", "attnzoo.testing.plugin"]
    seen = Seen()
    pytest.main([*given, *loaded, "--laws=thorough", "-k", "oracle or pruning or rows", str(tmp_path)], plugins=[seen])
    found = {report.nodeid.partition("[")[2]: report for report in seen.reports}
    assert {name: report.outcome for name, report in found.items()} == {
        "planted-oracle]": "failed" if planted else "passed",
        "planted-rows]": "passed",
        "planted-pruning]": "skipped",
    }
    assert "a state has no keys to prune" in str(found["planted-pruning]"].longrepr)
    if planted:
        assert "check('oracle', Case('planted', " in str(found["planted-oracle]"].longrepr)


def test_without_hypothesis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    for module in ("strategies", "trials"):
        monkeypatch.delitem(sys.modules, f"attnzoo.testing.{module}", raising=False)
    with pytest.raises(UnavailableError, match=r"needs hypothesis, .* pip install 'attnzoo\[testing\]'"):
        attnzoo.testing.battery  # noqa: B018
    assert attnzoo.testing.Case is Case  # what draws nothing needs nothing


def test_a_case_in_print_is_the_call_that_makes_it() -> None:
    case = Case("fox", T=3, block=1, cuts=(1,))
    assert repr(case) == "Case('fox', T=3, block=1, cuts=(1,))"
    assert eval(repr(case)) == case


def test_an_unknown_law_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown law 'oracel'.*did you mean 'oracle'"):
        check("oracel", Case("fox"))
