"""Training with and without pruning, by context: the headline of the paper on adaptive computation pruning."""

from attnzoo.experiments.catalogue.pairs import CPU, PACKAGES, size
from attnzoo.experiments.claims import AtMost, Below, Value
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Size
from attnzoo.experiments.probes import KeptBlocks, Loss, PrunedLoss, Speed

PAPER = "Lin et al., Adaptive Computation Pruning for the Forgetting Transformer (2025)"
FOX, ACP = "FoX (Pro)", "FoX (Pro), ACP"
MODELS = {"3m": (256, 4, 950, 2e-3), "10m": (384, 6, 3240, 2e-3), "25m": (512, 8, 7500, 1e-3)}


def context(tokens: int, width: int, layers: int, steps: int, lr: float) -> Size:
    """A size of `pairs` in another context, with as many tokens a step."""
    return size(width, layers, steps, lr, settings=(f"data.context_length={tokens}", f"batch_size={65536 // tokens}"))


EXPERIMENT = Experiment(
    title="Training with pruning",
    question=(
        "FoX (Pro) trained with and without pruning by certificate, at three sizes, each in contexts of 4096, 8192 and "
        "16,384 tokens, with the gates that these runs learn: how fast, what is kept, and what it costs in loss. "
        "Speeds compare where one model is trained at a time: with `--jobs 1`, on one GPU."
    ),
    arms=(Arm(FOX, "fox"), Arm(ACP, "fox", {"acp": True})),
    settings=PACKAGES,
    options={"block": "pro"},
    sizes={
        "cpu": CPU,
        "gpu": context(4096, 256, 4, 240, 2e-3),  # a quarter of the tokens of gpu-3m-4k
        **{
            f"gpu-{name}-{tokens // 1024}k": context(tokens, *model)
            for name, model in MODELS.items()
            for tokens in (4096, 8192, 16384)
        },
    },
    probes=(Speed(), Loss(), KeptBlocks(lengths=(1.0,), block=64), PrunedLoss(length=1.0)),
    expectations=(
        Expectation("Training is faster with pruning.", f"{PAPER}, Figure 2: 10 to 40% with 4k to 16k tokens",
                    Below(Value(FOX, "training speed"), Value(ACP, "training speed"))),
        Expectation("Pruning costs less than a fiftieth of a nat.", f"{PAPER}, Figure 3",
                    Below(Value(ACP, "loss"), Value(FOX, "loss"), by=-0.02, paired=True)),
        Expectation("It drops half of the blocks of the training context, or more.", f"{PAPER}, Figure 2",
                    AtMost(Value(ACP, "blocks kept"), 0.5)),
    ),
)  # fmt: skip
