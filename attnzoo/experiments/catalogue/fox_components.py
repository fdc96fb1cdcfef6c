"""The rows of Table 3 of FoX's paper, its layer component by component, and the Transformer's in its Figure 11."""

from attnzoo.experiments.catalogue.pairs import PACKAGES, SIZES
from attnzoo.experiments.claims import Value, below, in_order
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured
from attnzoo.experiments.probes import AddedByLength, Loss, LossByPlace

PAPER = "Lin et al., Forgetting Transformer (2025)"
LLAMA, PRO = {"block": "llama"}, {"block": "pro"}
QK_NORM, GATE, NORM = {"qk_norm": "rms"}, {"output_gate": "sigmoid"}, {"output_norm": "rms"}
ROPE = {"rotary": 500_000.0}


def loss(arm: str) -> Value:
    return Value(arm, "loss")


BUILT_UP = (
    Arm("Transformer (LLaMA), no RoPE", "nope", LLAMA),
    Arm("Transformer (LLaMA)", "rope", LLAMA),
    Arm("FoX (LLaMA) + RoPE", "fox", {**LLAMA, **ROPE}),
    Arm("FoX (LLaMA)", "fox", LLAMA),
    Arm("FoX, QK-norm", "fox", {**LLAMA, **QK_NORM}),
    Arm("FoX, QK-norm, output gate", "fox", {**LLAMA, **QK_NORM, **GATE}),
    Arm("FoX, QK-norm, output gate and norm", "fox", {**LLAMA, **QK_NORM, **GATE, **NORM}),
    Arm("FoX (Pro)", "fox", PRO),
)
TAKEN_AWAY = (
    Arm("without QK-norm", "fox", {**PRO, "qk_norm": "none"}),
    Arm("without output gate", "fox", {**PRO, "output_gate": "none"}),
    Arm("without output norm", "fox", {**PRO, "output_norm": "none"}),
    Arm("without KV-shift", "fox", {**PRO, "kv_shift": False}),
)
WITH_ROPE = (  # between Transformer (LLaMA) and Transformer (Pro): Figure 11
    Arm("RoPE, QK-norm", "rope", {**LLAMA, **QK_NORM}),
    Arm("RoPE, QK-norm, output gate", "rope", {**LLAMA, **QK_NORM, **GATE}),
    Arm("RoPE, QK-norm, output gate and norm", "rope", {**LLAMA, **QK_NORM, **GATE, **NORM}),
)
REPLACED = (
    Arm("FoX (Pro) + RoPE", "fox", {**PRO, **ROPE}),
    Arm("Transformer (Pro)", "rope", PRO),
    Arm("Transformer (Pro), no RoPE", "nope", PRO),
)
ARMS = (*BUILT_UP, *TAKEN_AWAY, *REPLACED, *WITH_ROPE)
CORNERS = ("FoX (Pro)", "Transformer (Pro)", "FoX (LLaMA)", "Transformer (LLaMA)")

EXPERIMENT = Experiment(
    title="FoX, component by component",
    question=(
        "Table 3 of FoX's paper: from a LLaMA without RoPE to FoX (Pro), one component at a time, and from FoX (Pro) "
        "with one taken away, added or replaced; and its Figure 11, from Transformer (LLaMA) to Transformer (Pro). On "
        "the text and at the sizes of `pairs`, and at a smaller one. All models have an MLP of one width; the paper's "
        "is wider without an output gate, so that here such models have 9% fewer weights."
    ),
    arms=ARMS,
    settings=PACKAGES,
    sizes=SIZES,
    probes=(Loss(), LossByPlace(factor=4), AddedByLength(factor=4)),
    expectations=(
        Expectation("FoX (Pro) is below Transformer (Pro), which is below FoX (LLaMA), and that below Transformer "
                    "(LLaMA).", f"{PAPER}, Figure 2 and Table 3",
                    in_order(*map(loss, CORNERS))),
        Expectation("Each of the four components of the Pro block helps where all others are there.",
                    f"{PAPER}, Table 3",
                    below("loss", *(("FoX (Pro)", arm.name) for arm in TAKEN_AWAY))),
        Expectation("Each helps where it is added to those before it.", f"{PAPER}, Table 3",
                    in_order(*(loss(arm.name) for arm in reversed(BUILT_UP[3:])))),
        Expectation("RoPE takes no more than a hundredth of a nat from FoX (Pro).", f"{PAPER}, Table 3",
                    below("loss", ("FoX (Pro)", "FoX (Pro) + RoPE"), by=-0.01)),
        Expectation("Without forget gate and RoPE a model is the worst of its block.", f"{PAPER}, Table 3",
                    below("loss", *((model, f"{model}, no RoPE")
                                    for model in ("Transformer (LLaMA)", "Transformer (Pro)")))),
        Expectation("QK-norm keeps the Transformer's loss down beyond the training context.",
                    f"{PAPER}, appendix F.2 and Figure 11",
                    below(AddedByLength().name, ("RoPE, QK-norm", "Transformer (LLaMA)"))),
        Expectation("Each component helps the Transformer, too, where it is added to those before it.",
                    "our own question, after its Figure 11",
                    in_order(*map(loss, ("Transformer (Pro)", *(arm.name for arm in reversed(WITH_ROPE)),
                                         "Transformer (LLaMA)")))),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-29", "two busy cores of an AMD EPYC", "2026-11-29-fox_components-cpu.json",
            "Contexts of 128 bytes, and 0.3 MB of text. As at `gpu` FoX (LLaMA) is ahead of Transformer "
            "(Pro), 2.23 and 2.30 nats a byte, of the components the output gate helps (0.08 and 0.09 nats), and the "
            "output norm costs 0.06 where it is added and 0.09 where all others are there. Four times the context adds "
            "0.6 to 0.8 nats to each Transformer with RoPE, with QK-norm or without, and nothing to FoX, whose gates "
            "have forgotten by then whatever RoPE would turn.",
        ),
        Measured(
            "gpu", "2026-11-29", "one NVIDIA H200, 14 runs at a time", "2026-11-29-fox_components-gpu.json",
            "After 13 million tokens nothing copies, and a forget gate decides more than the block: FoX (LLaMA) 4.42, "
            "Transformer (Pro) 4.92. Of the components the output gate alone helps, by 0.17 nats where it is added and "
            "by 0.19 where all others are there; output norm and KV-shift cost 0.06 each where they are added, QK-norm "
            "changes nothing. Differences of 0.1 may be chance: the same three seeds of FoX (Pro), 4.36 here, came to "
            "4.38 to 4.46 in three other experiments. Four times the context adds 0.06 nats to Transformer (LLaMA), "
            "0.09 to 0.16 to the four with QK-norm.",
        ),
        Measured(
            "gpu-3m", "2026-11-29", "one NVIDIA H200, 8 runs at a time", "2026-11-29-fox_components-gpu-3m.json",
            "Four of the eighteen models, asked for by `--claim`: the paper's order, which `gpu` and `cpu` refute, is "
            "there after 62 million tokens. The losses are 1.69, 1.78, 1.90 and 2.30 nats. The last step is the least "
            "certain: three seeds of Transformer (LLaMA) lie between 2.15 and 2.47 (p = 0.023). The two models in the "
            "Pro block are `fox` and `rope` of `pairs` at its size `gpu`, trained anew, which have 1.68 and 1.78 "
            "there. Which component of the block brings it was not asked. Four times the context adds 2.44 nats to "
            "Transformer (LLaMA) and 0.13 to Transformer (Pro), and takes 0.05 from FoX (LLaMA) and 0.06 from FoX "
            "(Pro).",
            lacks=tuple(arm.name for arm in ARMS if arm.name not in CORNERS),
        ),
    ),
)  # fmt: skip
