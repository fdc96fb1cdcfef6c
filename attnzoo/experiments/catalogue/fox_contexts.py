"""Training contexts, short and long: Figures 6, 12 and 19 to 21 of FoX's paper."""

from attnzoo.experiments.catalogue.pairs import PACKAGES, SIZES
from attnzoo.experiments.claims import All, Below, Value, Wider, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Grid, Measured
from attnzoo.experiments.probes import AddedByLength, Loss, LossByPlace

PAPER = "Lin et al., Forgetting Transformer (2025)"
TIMES = {"short": 0.5, "usual": 1.0, "long": 4.0}  # contexts of 2048, 4096 and 16,384 tokens, as many tokens a step
MODELS = {
    "FoX (Pro)": ("fox", "pro"), "Transformer (Pro)": ("rope", "pro"),
    "FoX (LLaMA)": ("fox", "llama"), "Transformer (LLaMA)": ("rope", "llama"),
}  # fmt: skip


def name_of(model: str, context: str) -> str:
    return f"{model}, {context}"


def loss(model: str, context: str) -> Value:
    return Value(name_of(model, context), "loss")


def ahead(block: str, context: str) -> tuple[Value, Value]:
    return loss(f"FoX ({block})", context), loss(f"Transformer ({block})", context)


EXPERIMENT = Experiment(
    title="FoX by training context",
    question=(
        "Figure 6 of FoX's paper: what FoX gains over the Transformer grows with the training context, and shrinks "
        "with the size of the model (`attnzoo experiment sizes` with the results of several sizes). Appendix F.3: in a "
        "short context FoX (LLaMA) gains nothing but length. Half, one and four times the context of `pairs`, in both "
        "blocks, with as many tokens a step; Mamba-2 beside them where contexts are short."
    ),
    arms=(
        *(Arm(name_of(model, context), variant, {"block": block},
              times={"data.context_length": factor, "batch_size": 1 / factor} if factor != 1 else {})
          for context, factor in TIMES.items() for model, (variant, block) in MODELS.items()),
        Arm("Mamba-2, short", "mamba2", times={"data.context_length": TIMES["short"], "batch_size": 2}),
    ),
    settings=PACKAGES,
    sizes=SIZES,
    probes=(Loss(), LossByPlace(factor=2), AddedByLength(factor=2)),
    expectations=(
        *(Expectation(f"What FoX ({block}) is ahead of Transformer ({block}) grows with the training context.",
                      f"{PAPER}, Figures 6 and 20",
                      All((Wider(ahead(block, "usual"), ahead(block, "short")),
                           Wider(ahead(block, "long"), ahead(block, "usual")))))
          for block in ("Pro", "LLaMA")),
        Expectation("In a short context FoX (LLaMA) is not ahead of Transformer (LLaMA) by a hundredth of a nat.",
                    f"{PAPER}, appendix F.3", Below(*ahead("LLaMA", "short")[::-1], by=-0.01)),
        Expectation("FoX (Pro) is ahead of Transformer (Pro) there, too.", f"{PAPER}, appendix F.3",
                    Below(*ahead("Pro", "short"))),
        Expectation("And FoX (LLaMA) adds less loss in a context twice as long.", f"{PAPER}, appendix F.3",
                    below(AddedByLength().name,
                          (name_of("FoX (LLaMA)", "short"), name_of("Transformer (LLaMA)", "short")))),
    ),
    grids=(
        Grid("loss in the training context", tuple(MODELS), tuple(f"{context} context" for context in TIMES),
             tuple(tuple(name_of(model, context) for context in TIMES) for model in MODELS), "loss"),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-28", "two busy cores of an AMD EPYC", "2026-11-28-fox_contexts-cpu.json",
            "Contexts of 64, 128 and 512 bytes, and 0.3 MB of text. In the Pro block FoX is ahead by 0.077, 0.112 and "
            "0.208 nats: from the usual context to the long one its lead grows (p = 0.004), from the short one to the "
            "usual one three seeds do not tell (p = 0.098). All models lose in longer contexts, which are fewer rows a "
            "step. Of the short ones Mamba-2 in its own layer has the lowest loss.",
        ),
    ),
)  # fmt: skip
