"""The equalities that `attnzoo verify` checks: all of them, and by what limits."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import attnzoo
from attnzoo import get, list_variants
from attnzoo import verify as verification
from attnzoo.cli import app, main
from attnzoo.testing import LAWS, run_law

Where = verification.Where
LOW = {"device": "cpu", "dtype": torch.bfloat16, "shape": (1, 64, 2, 32)}


def test_verify_draws_other_inputs_with_another_seed() -> None:
    errors = [
        [check.worst for check in verification.verify(["retnet"], Where(seed=seed, examples=2))] for seed in (0, 0, 1)
    ]
    assert errors[0] == errors[1] != errors[2]


def test_verify_checks_every_law_and_kernel_of_every_variant_by_default() -> None:
    checks = verification.checks((), Where())
    kernels = [form for name in list_variants() for form in ("fla", "triton") if form in get(name).forms]
    assert len(checks) == len(LAWS) * len([*list_variants(), *list_variants("other")]) + len(kernels)


def test_what_is_missing_is_one_line_that_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    for module in ("trials", "strategies"):
        monkeypatch.delitem(sys.modules, f"attnzoo.testing.{module}", raising=False)
        monkeypatch.delattr(attnzoo.testing, module, raising=False)
    for name in ("run_law", "cases"):
        monkeypatch.delitem(vars(attnzoo.testing), name, raising=False)
    for command in ("verify", "explore"):
        monkeypatch.setattr(sys, "argv", ["attnzoo", command, "nope"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert "needs hypothesis, which is not installed: pip install 'attnzoo[testing]'" in said[0]


def test_one_name_in_place_of_several_is_refused() -> None:
    with pytest.raises(TypeError, match=r"names: expected a sequence of names such as \['fox'\], got 'nope'"):
        list(verification.verify("nope"))


def test_sizes_that_are_given_are_those_of_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    law = dataclasses.replace(LAWS["heads"], measure=lambda case: seen.add((case.B, case.T, case.H, case.K)) or {})
    monkeypatch.setitem(LAWS, "heads", law)
    assert run_law("fox", "heads", 5, shape=(1, 6, 4, 2)).ok
    assert seen == {(1, 6, 4, 2)}


@pytest.mark.parametrize(
    ("name", "form"), [("fox", "triton"), ("path_fox", "triton"), ("gated_deltanet", "fla"), ("gla", "fla")]
)
def test_kernel_is_held_to_twice_the_error_of_the_reference_in_its_precision(name: str, form: str) -> None:
    variant = get(name)
    parallel = variant.forms["parallel"]

    def with_form(kernel: Any) -> Any:
        return dataclasses.replace(variant, forms=MappingProxyType({**variant.forms, form: kernel}))

    good = verification.in_precision(with_form(parallel), form, Where(**LOW))
    assert good.ok
    assert good.worst[form] > 1e-5  # bfloat16, so the limit of float64 would refuse it
    bad = verification.in_precision(with_form(lambda *x, **more: 1.2 * parallel(*x, **more)), form, Where(**LOW))
    assert not bad.ok
    assert "(allowed " in bad.said


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), ValueError("shapes"), AssertionError()])
def test_kernel_that_breaks_has_failed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves these inputs, and what it raises is no reason to skip it."""
    variant = get("fox")

    def broken(*inputs: Any) -> torch.Tensor:
        raise error

    broken_one = dataclasses.replace(variant, forms=MappingProxyType({**variant.forms, "triton": broken}))
    monkeypatch.setattr(type(variant), "refuses", lambda self, form, call: "")
    check = verification.in_precision(broken_one, "triton", Where(**LOW))
    assert not check.ok
    assert not check.refused
    assert (str(error) or "AssertionError in test_verify.py, line ") in check.said
    monkeypatch.setattr(verification, "checks", lambda names, where: [lambda: check])
    result = CliRunner().invoke(app, ["verify", "fox"])
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "1 failed, 0 not run" in result.output


def test_a_form_that_raises_breaks_its_laws_and_the_others_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = get("nope")

    def broken(*inputs: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError("one head for all")

    theirs = dataclasses.replace(variant, forms=MappingProxyType({"scan": broken, **variant.forms}))
    monkeypatch.setattr("attnzoo.testing.case.get", lambda name: theirs)
    trials = {law: run_law("nope", law, 1) for law in ("oracle", "segments")}
    assert "NotImplementedError: one head for all" in trials["oracle"].said
    assert trials["segments"].ok


def test_kernel_of_few_tokens_is_verified_without_gradients() -> None:
    variant = get("gla")

    def values_alone(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert (q.shape[1], q.requires_grad) == (32, False)
        return variant.forms["parallel"](q, *rest)  # type: ignore[no-any-return]

    forms = MappingProxyType({**variant.forms, "triton": values_alone})
    check = verification.in_precision(dataclasses.replace(variant, forms=forms), "triton", Where(**LOW))
    assert check.ok
    assert not check.refused


def test_kernel_that_refuses_is_reported_with_its_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there, so the kernel serves")
    assert "CUDA" in verification.in_precision(get("gla"), "fla", Where(**LOW)).refused


def test_kernels_are_verified_on_a_cpu_by_the_interpreter() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU is there, so kernels are compiled")
    where = Where(dtype=torch.float32, interpret=True, shape=(1, 20, 1, 16))
    checks = {(check.law, *check.worst): check for check in verification.verify(["fox"], where)}
    forms = {("precision", form) for form in ("recurrent", "parallel", "sdpa")}
    assert checks.keys() == forms | {("kernel", "triton")}
    assert all(check.ok and not check.refused for check in checks.values()), checks
    with pytest.raises(ValueError, match="dtype: expected float32 or float16, for Triton's interpreter"):
        Where(dtype=torch.bfloat16, interpret=True)


def test_what_triton_interprets_sees_the_language() -> None:
    """Its interpreter refuses a function in whose module ``tl`` is not; the tests' own, quicker one does not."""
    root = Path(attnzoo.__file__).parent / "kernels"
    files = [path for path in root.rglob("*.py") if "@triton.jit" in path.read_text()]
    assert files
    assert not [str(path) for path in files if "import triton.language as tl" not in path.read_text()]
