"""A trained Transformer (Pro) whose layers become other variants: what a few tokens bring back."""

from typing import Any

from attnzoo.experiments.claims import Closed, Value, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Size
from attnzoo.experiments.probes import KeptBlocks, Loss, Speed
from attnzoo.models.config import ModelConfig
from attnzoo.trained.conversion import OF_THE_PEAK, PHASES, Target

STEPS, LR, SHARE, SMALLER = 320, 0.004, 0.045, 8  # batches of a conversion are an eighth of the original's
CONTEXTS = {"cpu": 128, "gpu": 512}
CONVERSION = {phase: round(SHARE * share * STEPS * SMALLER) for phase, share in PHASES.items()}
ORIGINAL = "transformer"
OURS = "our own question"
PRO = ModelConfig(attention="rope", attention_options={"block": "pro"})
TARGETS: dict[str, tuple[str, bool]] = {  # the target of `attnzoo convert`, and whether rotations stay
    "fox_rope": ("fox", True), "fox": ("fox", False), "gated_deltanet": ("gated_deltanet", True),
}  # fmt: skip


def budget(steps: int) -> tuple[str, ...]:
    return (f"steps={steps}", f"optimizer.warmup_steps={steps // 20}")


def size(rows: int, *settings: str, name: str = "cpu") -> Size:
    own = (f"batch_size={rows}", f"data.context_length={CONTEXTS[name]}", *settings)
    return Size(own, lrs=(LR,), tokens=16384, after=(f"batch_size={rows // SMALLER}",))


def arms(name: str, to: str, rotation: bool) -> tuple[Arm, ...]:
    """The conversion of the trained model, phase by phase, and without a teacher on the same tokens."""
    models = {size: Target(to, context, rotation).model(PRO) for size, context in CONTEXTS.items()}
    at: dict[str, dict[str, Any]] = {
        size: {key: value for key, value in model.attention_options.items() if key != "block"}
        for size, model in models.items()
    }

    def arm(kind: str, after: str, steps: int, lr: float, objective: str = "text") -> Arm:
        teacher = "" if objective == "text" else ORIGINAL
        settings = (*budget(steps), *([f"objective={objective}"] if teacher else []))
        return Arm(f"{name}, {kind}", models["cpu"].attention, {}, settings, (lr,), after, at, teacher)

    found = [arm("swapped", ORIGINAL, 1, 1e-12)]
    if name == "fox_rope":  # which begins where the original ended
        return tuple(found)
    before = ORIGINAL
    for phase, steps in CONVERSION.items():
        found.append(arm(f"after {phase}", before, steps, OF_THE_PEAK[phase] * LR, phase))
        before = found[-1].name
    found.append(arm("text alone", ORIGINAL, sum(CONVERSION.values()), OF_THE_PEAK["distil"] * LR))
    return tuple(found)


def loss(arm: str) -> Value:
    return Value(arm, "loss")


EXPERIMENT = Experiment(
    title="Conversion of a trained Transformer",
    question=(
        "A Transformer (Pro) with RoPE is trained; then its layers become FoX beside the rotation, FoX without it, or "
        "Gated DeltaNet beside it, on 4.5% of its tokens, in the phases of `attnzoo convert`: layers aligned one by "
        "one, the original's logits, the text, in batches of an eighth. How much of the loss that the swap costs is "
        "closed, and is it more than by training on as much text?"
    ),
    arms=(
        Arm(ORIGINAL, "rope", settings=budget(STEPS)),
        *(arm for name, target in TARGETS.items() for arm in arms(name, *target)),
    ),
    options={"block": "pro"},
    settings=("data.source=stdlib", "log_every=10"),
    sizes={
        "cpu": size(16, "eval_tokens=4096", "model={hidden_size: 64, num_layers: 2, num_heads: 2}"),
        "gpu": size(
            32, "eval_tokens=65536", "model={hidden_size: 256, num_layers: 4, num_heads: 4}", "mixed_precision=bf16",
            name="gpu",
        ),
    },
    probes=(Loss(), KeptBlocks(), Speed()),
    expectations=(
        *(Expectation(f"Most of the gap of {name} is closed on 4.5% of the tokens.", OURS,
                      Closed(loss(f"{name}, after text"), (loss(f"{name}, swapped"), loss(ORIGINAL))))
          for name in ("fox", "gated_deltanet")),
        Expectation("Beside the rotation, gates that begin open cost less than 0.01 nats.", OURS,
                    below("loss", ("fox_rope, swapped", ORIGINAL), by=-0.01, paired=True)),
        *(Expectation(f"{name} comes further than by training on as much text.", OURS,
                      below("loss", (f"{name}, after text", f"{name}, text alone"), paired=True))
          for name in ("fox", "gated_deltanet")),
        *(Expectation(f"{name}: each phase takes from the loss, the last one too.",
                      "Goldstein et al., RADLADS (2025), whose three phases these are",
                      below("loss", *((f"{name}, after {after}", f"{name}, {before}")
                                      for before, after in (("swapped", "align"), ("after align", "distil"),
                                                            ("after distil", "text"))), paired=True))
          for name in ("fox", "gated_deltanet")),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-28", "two busy cores of an AMD EPYC", "2026-11-28-convert-cpu.json",
            "The rates of the phases were chosen after one seed at another size, where the text at a fifth of the peak "
            "rate undid some of what the logits had brought; for Gated DeltaNet it does so at a tenth, too.",
        ),
    ),
)  # fmt: skip
