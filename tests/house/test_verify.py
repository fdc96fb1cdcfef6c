"""The equalities that `attnzoo verify` checks: all of them, and by what limits."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnzoo import get, list_variants
from attnzoo import verify as verification
from attnzoo.cli import app
from attnzoo.registry import PAIRS, PRODUCTS


def test_verify_draws_other_inputs_with_another_seed() -> None:
    errors = [[check.value for check in verification.verify(["retnet"], seed)] for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]


def test_verify_checks_every_variant_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_verify_variant", lambda variant, seed: iter([variant.name]))
    assert list(verification.verify()) == list(list_variants())


def test_one_name_in_place_of_several_is_refused() -> None:
    with pytest.raises(TypeError, match=r"names: expected a sequence of names such as \['fox'\], got 'nope'"):
        list(verification.verify("nope"))


def test_verify_checks_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "LENGTHS", (1, 13))  # test_forms has longer ones
    some = (*PAIRS[2:4], PAIRS[-1], PRODUCTS[0])  # without a matrix, and one of each kind
    names = [name for pair in some for name in (pair.linear, pair.softmax)]
    checks = list(verification.verify(names))
    assert {check.variant for check in checks} == set(names)
    assert all(check.ok for check in checks)
    for name in names:
        forms = {check.form for check in checks if check.variant == name}
        assert forms == {*get(name).forms, "extend"}


@pytest.mark.parametrize(
    ("name", "form"), [("fox", "triton"), ("path_fox", "triton"), ("gated_deltanet", "fla"), ("gla", "fla")]
)
def test_kernel_is_held_to_twice_the_error_of_the_reference_in_its_precision(name: str, form: str) -> None:
    variant = get(name)
    parallel = variant.forms["parallel"]

    def with_form(kernel: Any) -> Any:
        return dataclasses.replace(variant, forms=MappingProxyType({**variant.forms, form: kernel}))

    good = verification.verify_kernel(with_form(parallel), form, 0, "cpu")
    assert good.ok
    assert good.value > 1e-5  # bfloat16, so the limit of float64 would refuse it
    bad = verification.verify_kernel(with_form(lambda *x, **more: 1.2 * parallel(*x, **more)), form, 0, "cpu")
    assert not bad.ok


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), ValueError("shapes"), AssertionError()])
def test_kernel_that_breaks_has_failed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves these inputs, and what it raises is no reason to skip it."""
    variant = get("fox")

    def broken(*inputs: Any) -> torch.Tensor:
        raise error

    broken_one = dataclasses.replace(variant, forms=MappingProxyType({**variant.forms, "triton": broken}))
    monkeypatch.setattr(type(variant), "refuses", lambda self, form, call: "")
    check = verification.verify_kernel(broken_one, "triton", 0, "cpu")
    assert not check.ok
    assert not check.skipped
    assert check.failed == (str(error) or repr(error))
    monkeypatch.setattr(verification, "verify", lambda names, seed: iter([check]))
    result = CliRunner().invoke(app, ["verify", "fox"])
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "1 failed, 0 not run" in result.output


def test_a_form_that_raises_has_failed_and_the_others_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "LENGTHS", (1,))
    variant = get("nope")

    def broken(*inputs: Any) -> torch.Tensor:
        raise NotImplementedError("one head for all")

    theirs = dataclasses.replace(variant, forms=MappingProxyType({"scan": broken, **variant.forms}))
    checks = {check.form: check for check in verification._verify_variant(theirs, 0)}
    assert (checks["scan"].ok, checks["scan"].failed) == (False, "one head for all")
    assert checks["parallel"].ok


def test_kernel_of_few_tokens_is_verified_without_gradients() -> None:
    variant = get("gla")

    def values_alone(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert (q.shape[1], q.requires_grad) == (32, False)
        return variant.forms["parallel"](q, *rest)  # type: ignore[no-any-return]

    forms = MappingProxyType({**variant.forms, "triton": values_alone})
    check = verification.verify_kernel(dataclasses.replace(variant, forms=forms), "triton", 0, "cpu")
    assert check.ok
    assert not check.skipped
    assert check.gradient == 0


def test_kernel_that_refuses_is_reported_with_its_reason() -> None:
    variant = get("gla")
    if torch.cuda.is_available():
        pytest.skip("a GPU is there, so the kernel serves")
    check = verification.verify_kernel(variant, "fla", 0, "cpu")
    assert "CUDA" in check.skipped
