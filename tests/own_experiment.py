"""An experiment of one's own, small enough to train in a test."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from tiny_runs import EXPERIMENT as TINY

from attnzoo.experiments.plan import Schedule
from attnzoo.experiments.run import run_experiment

OWN = """
from attnzoo.data.tasks import TASKS
from attnzoo.experiments.claims import AtLeast, AtMost, Below, Value
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Grid, Overlay, Size
from attnzoo.experiments.probes import Wrong, WrongOver

ERROR = "wrong answers"
TASK = TASKS["flip_flop"]
EXPERIMENT = Experiment(
    title="Mine",
    question="Is a <fox> better than `none`?",
    arms=(Arm("fox", "fox"), Arm("none, one head", "nope", settings=("model.num_heads=1",), lrs=(0.1,))),
    sizes={"cpu": Size(SETTINGS, lrs=(0.01, 0.02), rows=4), "gpu": Size(SETTINGS, lrs=(0.01,))},
    settings=("data.source=task:mine.py", "data.context_length=8"),
    probes=(
        Wrong(ERROR, lengths=(1.0, 2.0)), Wrong("longer", lengths=(3.0,)), WrongOver("noise", "p_ignore", (0.0, 0.5))
    ),
    expectations=(
        Expectation("It is.", "a paper, Table 1", Below(Value("fox", ERROR, 1.0), Value("none, one head", ERROR, 1.0))),
        Expectation("It solves it.", "a paper, Table 2", AtMost(Value("fox", "longer"), 0.01)),
        Expectation("On a GPU.", "a paper, Table 3", AtLeast(Value("fox", "longer"), 0.01), sizes=("gpu",)),
    ),
    grids=(Grid("both", ("row",), ("a", "b", "c"), (("fox", "none, one head", ""),), ERROR),),
    maps=("noise", "longer"),
    overlays=(
        Overlay("Both at once", "share", (("a fox", "fox", ERROR), ("no fox", "none, one head", ERROR)),
                (("one point", "fox", "longer", "longer"),)),
    ),
)
"""


def write_own():
    """Write it into the folder that is current; its name."""
    Path("mine.py").write_text(OWN.replace("SETTINGS", repr(TINY)))
    return "mine.py"


def start(name, minutes=None, only=(), records=(), **options):
    plan = Schedule(**{"name": name, "size": "cpu", "out": Path("out"), "seeds": 2, "device": "cpu", **options})
    return run_experiment(plan, Console(quiet=True), "the <command>", 1, minutes, only, records)
