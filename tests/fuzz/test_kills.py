"""Runs killed at random moments by random signals, once or several times: each goes on to the same bits."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_processes import environment
from tiny_runs import outcome, write_text

BLOWS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture(scope="module")
def killer(tmp_path_factory):
    """A folder, and what strikes runs in it: a function of a case that returns how its processes ended."""
    folder = tmp_path_factory.mktemp("kills")
    write_text(folder)
    script = str(Path(__file__).with_name("killer.py"))
    with subprocess.Popen(
        [sys.executable, script, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as process:
        assert json.loads(process.stdout.readline()) == [0]

        def strike(case):
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield folder, strike
        process.stdin.close()


def test_a_run_killed_at_random_moments_goes_on_to_the_same_bits(fuzz, killer):
    folder, strike = killer
    expected = outcome(folder / "reference")
    for rng in fuzz(2):
        run = f"run{fuzz.seed}"
        blows = [[rng.random() * 1.1, rng.choice(BLOWS)] for _ in range(rng.choice([1, 1, 2, 3]))]
        *ends, last = strike({"run": run, "blows": blows})
        assert last == 0, (blows, ends)
        assert all(end in (0, 130, -blow[1]) for end, blow in zip(ends, blows, strict=True)), (blows, ends)
        assert outcome(folder / run) == expected, blows
        assert [path.name for path in (folder / run / "checkpoints").iterdir()] == ["step-00000012"], blows
        assert not [path for path in (folder / run).rglob("*") if path.suffix in (".part", ".tmp")], blows
        shutil.rmtree(folder / run)
