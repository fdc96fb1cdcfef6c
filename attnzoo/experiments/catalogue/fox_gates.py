"""Forget gates that depend on the data, that are learnt without it, and that are fixed: Figure 7 of FoX's paper."""

from attnzoo.experiments.catalogue.pairs import PACKAGES, SIZES
from attnzoo.experiments.claims import Claim, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured
from attnzoo.experiments.probes import AddedByLength, Loss, LossByPlace

PAPER = "Lin et al., Forgetting Transformer (2025)"
BLOCKS = {"Pro": "pro", "LLaMA": "llama"}
LONGEST = (64, 512, 4096, 32768)  # T_max, the tokens after which the slowest head has forgotten all but 1/e


def name_of(gate: str, block: str, longest: int) -> str:
    return f"{gate} to {longest} ({block})"


def best_of_none(gate: str, block: str) -> Claim:
    """The gate that depends on the data is below every other of a block."""
    return below("loss", *((f"data-dependent ({block})", name_of(gate, block, T)) for T in LONGEST))


EXPERIMENT = Experiment(
    title="Must a forget gate depend on the data?",
    question=(
        "Figure 7 of FoX's paper: a forget gate that depends on the data beside one per head that is learnt but the "
        "same for all tokens, and one that is fixed, which is ALiBi; their decay lengths begin between 2 tokens and "
        "T_max, which is varied. In the LLaMA block and in the Pro block, on the text and at the sizes of `pairs`, and "
        "at a smaller one."
    ),
    arms=tuple(
        arm for name, block in BLOCKS.items() for arm in (
            Arm(f"data-dependent ({name})", "fox", {"block": block}),
            *(Arm(name_of(gate, name, T), "fox", {"block": block, "gate": gate, "t_min": 2.0, "t_max": float(T)})
              for gate in ("independent", "fixed") for T in LONGEST),
        )
    ),
    settings=PACKAGES,
    sizes=SIZES,
    probes=(Loss(), LossByPlace(factor=4), AddedByLength(factor=4)),
    expectations=tuple(
        Expectation(f"A gate that depends on the data is better than {what}, whatever T_max, in the {block} block.",
                    f"{PAPER}, Figure 7", best_of_none(gate, block))
        for block in BLOCKS for gate, what in (("independent", "one that does not"), ("fixed", "a fixed one"))
    ),
    measured=(
        Measured(
            "cpu", "2026-11-29", "two busy cores of an AMD EPYC", "2026-11-29-fox_gates-cpu.json",
            "Contexts of 128 bytes, and 0.3 MB of text. In the Pro block the gate that depends on the data is ahead of "
            "all eight others by 0.04 to 0.05 nats. In the LLaMA block it is by 0.02 to 0.03 in the mean, but its own "
            "seeds differ by more. T_max hardly matters in so short a context (0.02 nats at most), nor does it whether "
            "a gate that is the same for all tokens is learnt. A context four times as long adds "
            "less than a hundredth of a nat to any of them.",
        ),
        Measured(
            "gpu", "2026-11-29", "one NVIDIA H200, 8 runs at a time", "2026-11-29-fox_gates-gpu.json",
            "After 13 million tokens the blocks disagree. In the LLaMA block the gate that depends on the data is "
            "ahead of all eight others, by 0.21 to 0.33 nats. In the Pro block it is behind all eight, by 0.12 to 0.44 "
            "(4.57 against 4.13 to 4.45), most where T_max is 64. But it was trained at another learning rate than "
            "the other seventeen models, all at 0.005: of its short trials, of one seed each, 0.002 came out at 5.371 "
            "and 0.005 at 5.388. At 0.005 the same three seeds of it came to 4.36 in `fox_components`, 4.38 in "
            "`fox_far`, 4.44 in `pairs` and 4.46 in `fox_sensitivity`, 0.22 to 0.33 behind gates with a T_max of 64. "
            "With the first of these in place of its own runs both claims about the Pro block would be open, with "
            "each of the others one or both stay refuted. Whether a gate that is the same for all tokens is learnt "
            "changes 0.03 nats at most.",
        ),
    ),
)  # fmt: skip
