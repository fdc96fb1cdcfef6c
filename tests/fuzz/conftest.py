"""How often the fuzzers call, from which seed, and what a failure says of the call that failed.

A fuzzer takes `fuzz` and loops over it: `for rng in fuzz(20)` makes 20 cases, each from a generator of its own that the
test's name and the case's seed decide; torch's generator is seeded alike. `--fuzz-times` multiplies the 20, and
`--fuzz-seed` is the seed of the first case. A failure prints the command that repeats its one case.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator

import pytest
import torch

NAME = "fuzz cases"


class Fuzz:
    """Gives a test its cases; `seed` is that of the case under way."""

    def __init__(self, name: str, times: float, first: int):
        self.name, self.times, self.first = name, times, first
        self.seed: int | None = None
        self.done = 0

    def __call__(self, cases: int) -> Iterator[random.Random]:
        """A generator for each case: `cases` of them in the short profile, at least one in any."""
        for seed in range(self.first, self.first + max(1, round(cases * self.times))):
            self.seed = seed
            self.done += 1
            torch.manual_seed(seed)
            yield random.Random(f"{self.name} {seed}")
        self.seed = None


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    options = request.config.option
    return Fuzz(request.node.name, options.fuzz_times, options.fuzz_seed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    times = config.option.fuzz_times
    for item in items:
        if times > 1 and "fuzz" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600 * times))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    cases = getattr(item, "funcargs", {}).get("fuzz")
    if cases is not None and call.when == "call":
        report.user_properties.append((NAME, cases.done))
        if report.failed and cases.seed is not None:
            command = f"python -m pytest {shlex.quote(item.nodeid)} --fuzz-times=0 --fuzz-seed={cases.seed}"
            report.sections.append(("fuzz", f"the case of seed {cases.seed} failed; to repeat it alone:\n{command}"))
    return report


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, [])]
    count = sum(number for report in reports for name, number in report.user_properties if name == NAME)
    if count:
        terminalreporter.write_line(f"{count} {NAME}, from seed {terminalreporter.config.option.fuzz_seed}")
