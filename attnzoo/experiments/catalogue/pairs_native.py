"""Every pair in the layers of their papers: what equal layers cannot tell."""

from dataclasses import replace

from attnzoo.experiments.catalogue.pairs import BASES, LOSS, OURS, PAIRS, PARTS, TEXT, pairs
from attnzoo.experiments.catalogue.pairs import EXPERIMENT as EQUAL
from attnzoo.experiments.claims import All, Below, Correlated, Value
from attnzoo.experiments.experiment import Arm, Expectation, Measured

PRO = {"block": "pro"}  # FoX's own layer; that of every other variant is its default
COPIED = Value("", "loss of a text read again", 1.0), Value("", "L(i)", 0.5)
CONVOLVED = "mamba2", "deltanet", "gated_deltanet", "kda"  # whose layers have short convolutions
PLAIN = tuple(linear for linear, _, _ in PAIRS if linear not in CONVOLVED)


def copies(arm: str) -> Below:
    """The claim that a text costs half a nat less the second time than the first time."""
    again, first = (replace(value, arm=arm) for value in COPIED)
    return Below(again, first, by=0.5)


EXPERIMENT = replace(
    EQUAL,
    title="Every pair in its own layers",
    question=(
        "Is it the layer that decides, and not the pair? The nine pairs of `pairs`, each side in the layer that it was "
        "published with: short convolutions, larger states and output gates where a recurrence has them, none of "
        "Pro's parts on the softmax side but FoX's. Text, tokens and learning rates as in `pairs`; weights differ by "
        "what a layer adds, RetNet has its rotation, and Mamba's layers stand beside an MLP here."
    ),
    arms=(
        *(Arm(name, name) for name in BASES),
        *(Arm(name, name, PRO if name.startswith("fox") else {}) for pair in PAIRS for name in pair[:2]),
    ),
    options={},
    expectations=(
        Expectation("In their own layers, too, what helps a recurrence helps its dual: the gains are correlated.", OURS,
                    Correlated(BASES, pairs(str), LOSS, PARTS, TEXT)),
        Expectation("A recurrence whose own layer has short convolutions learns to copy: a text costs half a nat less "
                    "the second time.", "our own question, after `pairs`: in equal layers none did",
                    All(tuple(map(copies, CONVOLVED)))),
        Expectation("So do the other recurrences but linear attention.", "our own question, after `pairs`",
                    All(tuple(map(copies, PLAIN)))),
        Expectation("So do the softmax sides.", "our own question, after `pairs`",
                    All(tuple(copies(softmax) for _, softmax, _ in PAIRS))),
        *(each for each in EQUAL.expectations if "open" not in each.text and not isinstance(each.claim, Correlated)),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-29", "a busy core of an AMD EPYC", "2026-11-29-pairs_native-cpu.json",
            "Two layers of 32 channels, 0.3 MB of text byte by byte, contexts of 128 and one rate for all. r = "
            "0.49, and 0.34 to 0.70 without any one pair. After so little text nothing copies in any layer, so the "
            "three claims about copying were bound to be refuted. With its short convolution Mamba-2 has the lowest "
            "loss, 2.06 (FoX 2.19), where it had 2.32 in equal layers. The machine stopped the run once, for want "
            "of memory; it went on where it was.",
        ),
        Measured(
            "gpu", "2026-11-29", "two NVIDIA H200, 16 runs at a time", "2026-11-29-pairs_native-gpu.json",
            "Time ended it: two seeds of nine models, one seed of eight, none of PaTH with Wall's gate, so nearly all "
            "claims wait for seeds. Rates are those of `pairs`. Of these runs alone the gains of seven pairs have "
            "r = 0.42 (p = 0.33), where the same seven have 0.56 in equal layers. No recurrence copies in its own "
            "layer either: the second reading of a text costs 0.01 to 0.12 nats less than the first. Of the softmax "
            "sides those in FoX's layer copy as before, the others less: RoPE by 0.37 nats, where it was 1.42.",
            lacks=("path_wall",), seeds=1,
        ),
    ),
)  # fmt: skip
