"""Associative recall over the size of the state."""

from attnzoo.experiments.claims import All, AtMost, Below, Value
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Grid, Measured, Size
from attnzoo.experiments.probes import Wrong

PAPER = "Arora et al., Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff (2024), Figure 2"
ZOOLOGY = "Arora et al., Zoology: Measuring and Improving Recall in Efficient Language Models (2023), Figure 2"
WRONG = "wrong answers"
LINEAR = ("linear_attention", "mamba2", "deltanet", "gated_deltanet")
SOFTMAX = ("nope", "fox")
CHANNELS = (8, 16)  # K = V per head; a head's state has K V numbers


def name_of(variant: str, channels: int) -> str:
    return f"{variant}, K = {channels}"


def wrong(variant: str, channels: int) -> Value:
    return Value(name_of(variant, channels), WRONG)


EXPERIMENT = Experiment(
    title="Recall by the size of the state",
    question=(
        "Keys with values, then each key once more: who says its value? A softmax keeps every key; a recurrence keeps "
        "K V numbers per head, in which many keys do not fit. Two heads of equal layers, K = V from small to large; "
        "the width of the model does not change."
    ),
    arms=tuple(
        Arm(name_of(variant, K), variant, {"head_dim": K, "value_dim": K})
        for variant in (*LINEAR, *SOFTMAX)
        for K in CHANNELS
    ),
    settings=("data.source=task:mqar",),
    options={"block": "pro"},
    sizes={
        "cpu": Size(
            settings=(
                "data.task_options={vocab_size: 64, pairs: 8}", "steps=1000", "batch_size=32", "data.context_length=40",
                "log_every=100", "eval_tokens=8192", "model={hidden_size: 64, num_layers: 1, num_heads: 2}",
                "optimizer.warmup_steps=50",
            ),
            lrs=(0.003, 0.01),
        ),
        "gpu": Size(
            settings=(
                "data.task_options={vocab_size: 1024, pairs: 32}", "steps=2500", "batch_size=64",
                "data.context_length=128", "log_every=200", "eval_tokens=65536",
                "model={hidden_size: 128, num_layers: 1, num_heads: 2}", "optimizer.warmup_steps=200",
            ),
            lrs=(0.003,),
            rows=1024,
        ),
    },
    probes=(Wrong(WRONG),),
    expectations=(
        Expectation("The softmax side solves it with the largest heads (under 1% wrong).", ZOOLOGY,
                    All((AtMost(wrong("nope", 16), 0.01), AtMost(wrong("fox", 16), 0.01)))),
        Expectation("A larger state recalls more: K = 16 against K = 8 of every recurrence.", PAPER,
                    All(tuple(Below(wrong(variant, 16), wrong(variant, 8)) for variant in LINEAR))),
        Expectation("With the same small state the delta rule recalls more than a sum of all values.",
                    "Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers (2021)",
                    Below(wrong("deltanet", 8), wrong("linear_attention", 8))),
        Expectation("At equal heads FoX recalls more than Mamba-2.", ZOOLOGY,
                    Below(wrong("fox", 8), wrong("mamba2", 8))),
    ),
    grids=tuple(
        Grid(f"wrong answers, {side} side", variants, tuple(f"K = {K}" for K in CHANNELS),
             tuple(tuple(name_of(variant, K) for K in CHANNELS) for variant in variants), WRONG)
        for side, variants in (("linear", LINEAR), ("softmax", SOFTMAX))
    ),
    measured=(
        Measured(
            "cpu", "2026-11-22", "32 shared cores of an Intel Xeon", "2026-11-22-recall-cpu.json",
            "In 1,000 steps some runs have not begun to learn: FoX with K = 8 in two of three, Mamba-2 with K = 8 and "
            "gated DeltaNet with K = 16 in one of three.",
        ),
    ),
)  # fmt: skip
