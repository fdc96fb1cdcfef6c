"""Settings of every test: one thread, the Triton interpreter where there is no GPU, Hypothesis profiles."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import defaultdict
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # numpy's products too, and the processes that tests start

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so it is set before anything else

import pytest
from hypothesis import HealthCheck, settings
from quick_interpreter import quicken

from attnzoo.registry import PRODUCTS

torch.set_num_threads(1)
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in a job in the background; the tests send them
        signal.signal(number, default)
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    quicken()

_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=12, derandomize=True, database=None, **_COMMON)
settings.register_profile("quick", max_examples=2, derandomize=True, database=None, **_COMMON)
settings.register_profile("long", max_examples=200, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))  # --hypothesis-profile has the last word


def pytest_addoption(parser: pytest.Parser) -> None:
    fuzz = parser.getgroup("fuzz", "tests/fuzz")
    fuzz.addoption("--fuzz-times", type=float, default=1, help="times as many cases as in the short profile; 0 for one")
    fuzz.addoption("--fuzz-seed", type=int, default=0, help="seed of the first case of each fuzzer")


# The code of a product is that of its factors, which the pairs of factors run in full. Outside the long profile all
# products run what is held against the oracle, with few examples, and two stand for all of them elsewhere.
OF_PRODUCTS = {name for pair in PRODUCTS for name in (pair.linear, pair.softmax)}
EVERYWHERE = {"kda", "fox_rope"}
FOR_ALL = {
    "test_forms_equal_oracle", "test_segmented_equals_full", "test_equations_equal_oracle",
    "test_pieces_padding_and_packing_equal_whole_sequences",
}  # fmt: skip
FEW = 3
NAMED = 2  # products that a test may name itself; more come from the registry


def product(item: pytest.Item) -> str:
    """The product that a test is about, or ""."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [name for value in given for name in (value if isinstance(value, tuple) else (value,))]
    return next((name for name in names if isinstance(name, str) and name in OF_PRODUCTS), "")


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests of products that others stand for: of those that take their variants from the registry, not by name."""
    products = defaultdict(set)
    for item in items:
        products[item.path, item.originalname].add(product(item))
    return [
        item
        for item in items
        if product(item) not in {"", *EVERYWHERE}
        and len(products[item.path, item.originalname] - {""}) > NAMED
        and item.originalname not in FOR_ALL
        and item.path.name != "test_registry.py"
    ]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Few examples of a product, by the place where Hypothesis looks for the settings of a test that it runs."""
    usual = getattr(item.obj, "_hypothesis_internal_use_settings", None)
    if usual is None or not product(item) or settings.get_current_profile_name() == "long":
        yield
        return
    item.obj._hypothesis_internal_use_settings = settings(usual, max_examples=min(FEW, usual.max_examples))
    yield
    item.obj._hypothesis_internal_use_settings = usual


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if settings.get_current_profile_name() != "long":
        out = set(left_out(items))
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
    here = torch.cuda.is_available()
    missing = importlib.util.find_spec("fla") is None
    for item in items:
        if item.get_closest_marker("gpu") and not here:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))
        elif item.get_closest_marker("fla") and missing:
            item.add_marker(
                pytest.mark.skip(reason="flash-linear-attention is not installed (pip install 'attnzoo[fla]')")
            )
