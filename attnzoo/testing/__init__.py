"""The laws that hold for every variant, for tests of one's own; needs the extra ``[testing]``.

``test_laws = battery("my_linear", "my_softmax")`` makes the tests of a pair, ``check`` repeats one case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnzoo.errors import UnavailableError
from attnzoo.lazy import lazy

if TYPE_CHECKING:
    from attnzoo.testing.case import Case, Inputs, block_sizes, in_float64, take
    from attnzoo.testing.compare import (
        CPU_FORMS,
        LIMIT,
        Form,
        assert_close,
        extend_in_segments,
        extend_with_steps,
        leaves_of,
        reference_forms,
        relative_error,
        straightforward,
        value_and_gradients,
    )
    from attnzoo.testing.laws import LAWS, Law, Trial
    from attnzoo.testing.strategies import cases, cut_points
    from attnzoo.testing.trials import PROFILES, BrokenLawError, battery, check, run_law

__all__ = [
    "CPU_FORMS",
    "LAWS",
    "LIMIT",
    "PROFILES",
    "BrokenLawError",
    "Case",
    "Form",
    "Inputs",
    "Law",
    "Trial",
    "assert_close",
    "battery",
    "block_sizes",
    "cases",
    "check",
    "cut_points",
    "extend_in_segments",
    "extend_with_steps",
    "in_float64",
    "leaves_of",
    "reference_forms",
    "relative_error",
    "run_law",
    "straightforward",
    "take",
    "value_and_gradients",
]
_HOMES = (
    dict.fromkeys(__all__, "compare")
    | dict.fromkeys(("Case", "Inputs", "block_sizes", "in_float64", "take"), "case")
    | dict.fromkeys(("LAWS", "Law", "Trial"), "laws")
    | dict.fromkeys(("cases", "cut_points"), "strategies")
    | dict.fromkeys(("PROFILES", "BrokenLawError", "battery", "check", "run_law"), "trials")
)
_get = lazy(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name not in ("hypothesis", "pytest"):
            raise
        raise UnavailableError(
            f"attnzoo.testing.{name}: this needs {error.name}, which is not installed: pip install 'attnzoo[testing]'"
        ) from error
