"""Products of permutations of three things."""

from attnzoo.experiments.claims import at_least, at_most
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Size, arms_of, training
from attnzoo.experiments.probes import Wrong

GRAZZI = "Grazzi et al., Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues (2025)"
SIEMS = "Siems et al., DeltaProduct (2025), on state tracking in permutation groups"
WRONG = "wrong answers"

EXPERIMENT = Experiment(
    title="S3: products of reflections",
    question=(
        "Each token permutes three things; which permutation are all so far? Swaps are reflections, I - 2 w w^T, and "
        "what turns the three round is two of them. Asked at every token, on rows as long as in training and longer. "
        "Without short convolutions, which mix what one token does with what its neighbours do and are slow to unlearn."
    ),
    arms=(
        Arm("delta, beta to 2", "deltanet", {"allow_neg_eigval": True}),
        Arm("delta, beta to 1", "deltanet"),
        Arm("2 factors, beta to 2", "deltanet", {"allow_neg_eigval": True, "num_householder": 2}),
        Arm("2 factors, beta to 1", "deltanet", {"num_householder": 2}),
        Arm("path", "path", {"w_conv_size": 0}),
        Arm("path, 2 factors", "path", {"w_conv_size": 0, "num_householder": 2}),
        *arms_of("rope", "fox"),
    ),
    settings=("data.source=task:word_problem", "data.task_options.group=S3", "optimizer.weight_decay=0.0"),
    options={"conv_size": 0},
    sizes={
        "cpu": Size(
            training(1000, 32, 16, "hidden_size: 32, num_layers: 1, num_heads: 2", warmup=100, eval_tokens=8192),
            lrs=(0.003, 0.01),
        ),
        "gpu": Size(
            training(1000, 128, 128, "hidden_size: 128, num_layers: 1, num_heads: 4", warmup=100, eval_tokens=65536,
                     log_every=200),
            lrs=(0.002, 0.005), rows=1024,
        ),
    },
    probes=(Wrong(WRONG, lengths=(1.0, 2.0, 4.0)),),
    expectations=(
        Expectation("Two factors with beta to 2 solve S3 in one layer on rows as long as in training (under 1% wrong).",
                    SIEMS, at_most(0.01, WRONG, "2 factors, beta to 2", at=1.0)),
        Expectation("They solve it on rows four times as long, too.", SIEMS,
                    at_most(0.01, WRONG, "2 factors, beta to 2")),
        Expectation("Beta to 1 does not, with one factor or two (over 10% wrong on longer rows).", GRAZZI,
                    at_least(0.1, WRONG, "delta, beta to 1", "2 factors, beta to 1")),
        Expectation("One factor with beta to 2 does not in one layer: a turn is two reflections.", SIEMS,
                    at_least(0.1, WRONG, "delta, beta to 2")),
        Expectation(
            "Attention with RoPE or a forget gate does not.",
            "Merrill and Sabharwal, The Parallelism Tradeoff (2023), of length that grows; Grazzi et al. (2025), "
            "for a Transformer",
            at_least(0.1, WRONG, "rope", "fox"),
        ),
    ),
    measured=(
        Measured("cpu", "2026-11-22", "two shared cores of an Intel Xeon", "2026-11-22-s3-cpu.json"),
        Measured("gpu", "2026-11-23", "one NVIDIA H200, beside other work", "2026-11-23-s3-gpu.json"),
    ),
)  # fmt: skip
