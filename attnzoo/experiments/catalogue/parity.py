"""Negative eigenvalues and parity."""

from attnzoo.experiments.claims import at_least, at_most
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Size, arms_of, training
from attnzoo.experiments.probes import Wrong

PAPER = (
    "Grazzi et al., Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues (2025), Theorem 1 and the "
    "experiments on parity"
)
WRONG = "wrong answers"
UNDECAYED = ("optimizer.weight_decay=0.0",)

EXPERIMENT = Experiment(
    title="Parity needs negative eigenvalues",
    question=(
        "Is the number of ones so far odd? A recurrence whose transitions have no negative eigenvalue forgets or "
        "keeps, but cannot flip; I - beta w w^T flips along w where beta exceeds 1. Asked at every token, on rows as "
        "long as in training and longer ones."
    ),
    arms=(
        Arm("deltanet, beta to 2", "deltanet", {"allow_neg_eigval": True}),
        Arm("deltanet, beta to 1", "deltanet"),
        Arm("gated_deltanet, beta to 2", "gated_deltanet", {"allow_neg_eigval": True}),
        Arm("gated_deltanet, beta to 1", "gated_deltanet"),
        *arms_of("mamba2", "path", "rope", "fox"),
    ),
    settings=("data.source=task:parity",),
    sizes={
        "cpu": Size(
            training(1000, 32, 32, "hidden_size: 32, num_layers: 1, num_heads: 2", warmup=100, eval_tokens=8192,
                     last=UNDECAYED),
            lrs=(0.003, 0.01),
        ),
        "gpu": Size(
            training(1200, 128, 128, "hidden_size: 128, num_layers: 2, num_heads: 4", warmup=200, eval_tokens=65536,
                     log_every=200, last=UNDECAYED),
            lrs=(0.001, 0.003), rows=1024,
        ),
    },
    probes=(Wrong(WRONG, lengths=(1.0, 2.0, 4.0)),),
    expectations=(
        Expectation("With beta to 2 the delta rule keeps parity, on rows four times as long, too (under 1% wrong).",
                    PAPER, at_most(0.01, WRONG, "deltanet, beta to 2", "gated_deltanet, beta to 2")),
        Expectation("With beta to 1 it does not (over 10% wrong on longer rows).", PAPER,
                    at_least(0.1, WRONG, "deltanet, beta to 1", "gated_deltanet, beta to 1")),
        Expectation("Nor does Mamba-2, whose gates are positive.", PAPER, at_least(0.1, WRONG, "mamba2")),
        Expectation(
            "Nor does softmax attention with RoPE or a forget gate.",
            "Hahn, Theoretical Limitations of Self-Attention in Neural Sequence Models (2020); Grazzi et al. (2025), "
            "the experiments on parity, for a Transformer",
            at_least(0.1, WRONG, "rope", "fox"),
        ),
    ),
    measured=(
        Measured("cpu", "2026-11-22", "two cores of an Intel Xeon", "2026-11-22-parity-cpu.json"),
        Measured(
            "gpu", "2026-11-23", "one NVIDIA H200, beside other work", "2026-11-23-parity-gpu.json",
            "With beta to 2 both answer all on rows as long as in training. On rows four times as long, gated DeltaNet "
            "is wrong on 0.1%, 0.5% and 1.7%.",
        ),
    ),
)  # fmt: skip
