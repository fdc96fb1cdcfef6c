"""Laws run on what Hypothesis draws: the worst error, or the smallest case that breaks one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from attnzoo.registry import file_of, from_file, get
from attnzoo.testing.case import Case
from attnzoo.testing.laws import LAWS, Errors, Trial, law_of
from attnzoo.testing.strategies import cases

PROFILES = {"quick": 10, "thorough": 200}  # examples of each law


class BrokenLawError(AssertionError):
    """A law does not hold on a case; the message says by how much, and has the call that repeats it.

    Attributes:
        errors: of each form by what they are of; empty where there are none, as the code raised.
    """

    def __init__(self, said: str, errors: Errors | None = None) -> None:
        super().__init__(said)
        self.errors: Errors = errors or {}


def check(law: str, case: Case, file: str | Path | None = None) -> dict[str, float]:
    """A law holds on a case: what a failure prints to be repeated.

    Args:
        law: any of :data:`attnzoo.testing.LAWS`.
        case: the inputs.
        file: the Python file that registers the variant, run first.

    Returns:
        The largest error of each form.

    Raises:
        BrokenLawError: it does not hold.
        ValueError: no such law or variant.
    """
    if file is not None:
        from_file(file)
    return _largest(measured(law, case))


def measured(law: str, case: Case) -> Errors:
    """The errors of each form by what they are of, where none breaks the law; else as :func:`check`."""
    known = law_of(law)
    get(case.name)  # an unknown variant breaks no law
    try:
        errors = known.measure(case)
    except Exception as error:  # of whoever wrote the forms
        said = f"{type(error).__name__}: {error}"
        raise BrokenLawError(_told(law, case, said)) from error
    wrong = [
        f"{form}: {what} off by {error:.2g}"
        for form, each in errors.items()
        for what, error in each.items()
        if not error <= known.budget
    ]
    if wrong:
        raise BrokenLawError(_told(law, case, f"{'; '.join(wrong)} (allowed {known.budget:g})"), errors)
    return errors


def _largest(errors: Errors) -> dict[str, float]:
    """The largest error of each form; one that is no number is the largest."""

    def size(error: float) -> float:
        return math.inf if math.isnan(error) else error

    return {form: max(each.values(), key=size, default=0.0) for form, each in errors.items()}


def _told(law: str, case: Case, said: str) -> str:
    path, here = file_of(case.name), Path.cwd()
    file = "" if path is None else f", {str(path.relative_to(here) if path.is_relative_to(here) else path)!r}"
    return (
        f"{case.name!r} breaks the law {law!r} ({LAWS[law].says})\n{said}\n"
        f"to repeat it: from attnzoo.testing import Case, check; check({law!r}, {case!r}{file})"
    )


def run_law(variant: str, law: str, examples: int, seed: int = 0, shape: Sequence[int] | None = None) -> Trial:
    """A law on ``examples`` cases of a variant that Hypothesis draws, and, where it breaks, shrinks.

    Args:
        variant: its name.
        law: any of :data:`attnzoo.testing.LAWS`.
        examples: how many, at most.
        seed: of the draws.
        shape: B, T, H and K of all cases, or None to draw them.
    """
    known = law_of(law)
    refused = known.refuses(get(variant))
    if refused:
        return Trial(variant, law, known.budget, refused=refused)
    worst: dict[str, float] = {}
    drawn: list[Case] = []

    def count(errors: Errors) -> None:
        for form, error in _largest(errors).items():
            worst[form] = max(error, worst.get(form, 0.0))

    def run(case: Case) -> None:
        drawn.append(case)
        count(measured(law, case))

    try:
        _search(run, cases(variant, shape=shape, **known.draws), examples, seed)
    except (BrokenLawError, hypothesis.errors.Flaky) as error:
        if isinstance(error, BrokenLawError):
            count(error.errors)
        return Trial(variant, law, known.budget, worst, len(drawn), case=drawn[-1], said=str(error))
    return Trial(variant, law, known.budget, worst, len(drawn))


def _search(run: Callable[[Case], None], strategy: Any, examples: int, seed: int) -> None:
    """``run`` on what is drawn; where it fails, once more on the smallest such case, whose error is raised."""
    with_settings = settings(
        max_examples=examples, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    seeded: Any = hypothesis.seed(seed)
    seeded(with_settings(hypothesis.given(strategy)(run)))()  # type: ignore[no-untyped-call]


def battery(*names: str) -> Callable[..., None]:
    """A test function for pytest: every law, of every variant that is named.

    A test file of a variant is three lines::

        import my_pair  # which registers it
        from attnzoo.testing import battery
        test_laws = battery("my_linear", "my_softmax")

    A law that does not apply is skipped with its reason. ``pytest --laws=thorough`` draws 200 examples of each.
    """
    import pytest

    @pytest.mark.parametrize("law", LAWS)
    @pytest.mark.parametrize("name", names)
    def test_laws(name: str, law: str, request: pytest.FixtureRequest) -> None:
        trial = run_law(name, law, PROFILES[request.config.getoption("--laws", "quick")])
        if trial.refused:
            pytest.skip(trial.refused)
        if not trial.ok:
            pytest.fail(trial.said, pytrace=False)

    return test_laws
