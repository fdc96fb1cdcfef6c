"""Settings of every test: one thread, the Triton interpreter where there is no GPU, Hypothesis profiles."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # numpy's products too, and the processes that tests start

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so it is set before anything else

import pytest
from hypothesis import HealthCheck, settings
from quick_interpreter import quicken
from thinning import left_out

pytest.register_assert_rewrite("command_line", "hf_models")
torch.set_num_threads(1)
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in a job in the background; the tests send them
        signal.signal(number, default)
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    quicken()

# What their tests share takes half a minute to prepare. A worker without work takes the last tests of another: were
# these the last, several workers would prepare it.
FIRST = ("test_training_processes.py", "test_training_kill.py")

_MODULES = [0]  # how many there were when garbage was last forgotten

_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=4, derandomize=True, database=None, **_COMMON)
settings.register_profile("quick", max_examples=2, derandomize=True, database=None, **_COMMON)
settings.register_profile("long", max_examples=200, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))  # --hypothesis-profile has the last word


def pytest_addoption(parser: pytest.Parser) -> None:
    fuzz = parser.getgroup("fuzz", "tests/fuzz")
    fuzz.addoption("--fuzz-times", type=float, default=1, help="times as many cases as in the short profile; 0 for one")
    fuzz.addoption("--fuzz-seed", type=int, default=0, help="seed of the first case of each fuzzer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = set(left_out(items))
    config.hook.pytest_deselected(items=list(out))
    items[:] = sorted((item for item in items if item not in out), key=lambda item: item.path.name not in FIRST)
    here = torch.cuda.is_available()
    missing = importlib.util.find_spec("fla") is None
    for item in items:
        if item.get_closest_marker("gpu") and not here:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and none is seen (make test-gpu)"))
        elif item.get_closest_marker("fla") and missing:
            item.add_marker(
                pytest.mark.skip(reason="flash-linear-attention is not installed (pip install 'attnzoo[fla]')")
            )


def pytest_collection_finish() -> None:
    forget_garbage()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    imported = len(sys.modules) > _MODULES[0] + 100
    if nextitem is not None and (nextitem.path != item.path or imported):
        forget_garbage()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()  # other workers' tests run on the same GPU


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    begin_anew(str(fixturedef.argname))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    begin_anew(item.nodeid)


def begin_anew(name: str) -> None:
    """What is drawn without a seed is the same whatever ran before, and a run that trained here leaves no setting."""
    torch.default_generator.manual_seed(zlib.crc32(name.encode()))
    torch.set_flush_denormal(False)


def forget_garbage() -> None:
    """What trains and compiles collects garbage each time: in what one file made, not in all before it, nor in what a
    test imported."""
    gc.collect()
    gc.freeze()
    _MODULES[0] = len(sys.modules)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of PaTH's pages that become whole within a test's short texts."""
    monkeypatch.setattr("attnzoo.forms.caches.path_pages.pool.GROUP", 2)
