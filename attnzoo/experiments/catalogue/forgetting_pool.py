"""The readings of One-Pass Forgetting's pool, with the same training: which of them is the default, by this record."""

from typing import Any

from attnzoo.experiments.claims import Below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Overlay
from attnzoo.experiments.forgetting_arms import LATER, NETWORK, WINDOW, ahead, network, reaching, text_sizes
from attnzoo.experiments.forgetting_probes import AddedLoss
from attnzoo.experiments.probes import Loss

STEPS = ("steps=400",)
PAPER = "One-Pass Forgetting, section 2.1 and ablation 2"
SHARES = (0.03125, 0.0625, 0.125)
TIGHT, LOOSE = 0.0625, 0.125
NEAR: dict[str, Any] = {"discount": reaching(10)}


def less(arm: str, other: str, at: float = TIGHT) -> Below:
    return ahead(arm, other, NETWORK, at)


EXPERIMENT = Experiment(
    title="The readings of the pool",
    question=(
        "The paper pools a key's contributions to later rows by a softmaxpool, discounted or not, and does not say of "
        "what. Here: a soft maximum of the contributions' logarithms (`power`, the default), of the contributions "
        "themselves (`softmax`, the plain reading), or the largest (`max`). Networks of keys are trained alone beside "
        "the same RoPE model, by their targets alone. What is added to the loss where a head holds few keys?"
    ),
    arms=(
        Arm("rope", "rope", settings=STEPS),
        network("logarithms", "rope"),
        network("contributions", "rope", pool="softmax"),
        network("largest", "rope", pool="max"),
        network("logarithms, discount", "rope", **NEAR),
        network("contributions, discount", "rope", pool="softmax", **NEAR),
    ),
    options={"block": "pro"},
    settings=("data.source=stdlib",),
    sizes=text_sizes(cpu=("steps=120", "batch_size=4", "optimizer.warmup_steps=10")),
    probes=(
        Loss(),
        AddedLoss(NETWORK, "retention", SHARES),
        AddedLoss(WINDOW, "window", SHARES),
        AddedLoss(LATER, "utility", SHARES),
    ),
    expectations=(
        Expectation("With a sixteenth of the keys the default adds less than the plain reading, contributions.", PAPER,
                    less("logarithms", "contributions")),
        Expectation("And with an eighth.", PAPER, less("logarithms", "contributions", LOOSE)),
        Expectation("The default adds less than the largest contribution.", PAPER, less("logarithms", "largest")),
        Expectation("With a discount, too, the default adds less than contributions.", PAPER,
                    less("logarithms, discount", "contributions, discount")),
        Expectation("A discount adds less than none.", PAPER, less("logarithms, discount", "logarithms")),
    ),
    overlays=(
        Overlay(
            "What a network learns from", "nats added",
            (
                *((name, name, NETWORK) for name in ("logarithms", "contributions", "largest", "logarithms, discount",
                                                     "contributions, discount")),
                (WINDOW, "rope", WINDOW), (LATER, "rope", LATER),
            ),
        ),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-29", "a busy core of an AMD EPYC", "2026-11-29-forgetting_pool-cpu.json",
            "What is pooled makes no difference that three seeds see (0.021 to 0.024 nats at 16 of 256 keys, a window "
            "0.022); logarithms stay the default for what a temperature means, not for what they save. A discount "
            "takes 0.007 off (p = 0.054).",
        ),
    ),
)  # fmt: skip
