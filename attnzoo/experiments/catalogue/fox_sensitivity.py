"""Learning rates and training tokens of FoX and the Transformer: Figures 5 and 22 to 24 of FoX's paper."""

from itertools import pairwise

from attnzoo.experiments.catalogue.fox_far import with_rows
from attnzoo.experiments.catalogue.pairs import PACKAGES, SIZES, size
from attnzoo.experiments.claims import All, Below, Value, Wider, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Grid, Measured
from attnzoo.experiments.probes import AddedByLength, Loss, LossByPlace
from attnzoo.experiments.text_probes import Needle

PAPER = "Lin et al., Forgetting Transformer (2025)"
MODELS = {"FoX (Pro)": "fox", "Transformer (Pro)": "rope"}
RATES = (1e-3, 2e-3, 5e-3)
TIMES = {"half": 0.5, "all": 1.0, "twice": 2.0}  # of the size's steps
ADDED, FURTHER = AddedByLength(), Needle("needle at twice the context, wrong", 2.0)


def name_of(model: str, rate: float, tokens: str = "all") -> str:
    return f"{model}, {rate:g}, {tokens} the tokens"


def added(model: str, rate: float, tokens: str = "all") -> Value:
    return Value(name_of(model, rate, tokens), ADDED.name)


def spread(model: str, by_rate: bool) -> tuple[Value, Value]:
    """The losses added by a longer context at the ends of the rates, or of the tokens."""
    ends = [(RATES[0], "all"), (RATES[-1], "all")] if by_rate else [(RATES[1], "half"), (RATES[1], "twice")]
    one, other = (added(model, *end) for end in ends)
    return one, other


EXPERIMENT = Experiment(
    title="FoX by learning rate and training tokens",
    question=(
        "Figure 5 of FoX's paper: how far a model reads beyond its training context, and finds a needle there, depends "
        "on its learning rate and on how much it read in training. FoX (Pro) and Transformer (Pro) at three rates with "
        "as many tokens as in `pairs`, half as many and twice as many; no rate is searched."
    ),
    arms=tuple(
        Arm(name_of(model, rate, tokens), variant, lrs=(rate,), times={"steps": factor} if factor != 1 else {})
        for model, variant in MODELS.items() for tokens, factor in TIMES.items() for rate in RATES
    ),
    settings=PACKAGES,
    options={"block": "pro"},
    sizes=with_rows({**SIZES, "gpu-3m": size(256, 4, 950, 2e-3)}),
    probes=(Loss(), LossByPlace(factor=4), ADDED, Needle(), FURTHER),
    expectations=(
        Expectation("More training tokens make FoX worse beyond its training context.", f"{PAPER}, Figure 5",
                    All(tuple(Below(added("FoX (Pro)", 2e-3, fewer), added("FoX (Pro)", 2e-3, more))
                              for fewer, more in pairwise(TIMES)))),
        Expectation("So does a learning rate that is lower.", "our own question, after its Figure 5",
                    Below(*spread("FoX (Pro)", True)[::-1])),
        Expectation("FoX is better than the Transformer at every rate and with any number of tokens.",
                    "our own question, after its Figure 2",
                    below("loss", *((name_of("FoX (Pro)", rate, tokens), name_of("Transformer (Pro)", rate, tokens))
                                    for rate in RATES for tokens in TIMES))),
        Expectation("The Transformer's loss beyond its training context rises with the tokens by more than FoX's.",
                    "our own question, after its Figure 24",
                    Wider(spread("Transformer (Pro)", False), spread("FoX (Pro)", False))),
    ),
    grids=tuple(
        Grid(f"{title}, {model}", tuple(f"rate {rate:g}" for rate in RATES), tuple(f"{t} the tokens" for t in TIMES),
             tuple(tuple(name_of(model, rate, tokens) for tokens in TIMES) for rate in RATES), probe)
        for title, probe in (("loss", "loss"), ("loss added at four contexts", ADDED.name)) for model in MODELS
    ),
    measured=(
        Measured(
            "cpu", "2026-11-29", "a busy core of an AMD EPYC", "2026-11-29-fox_sensitivity-cpu.json",
            "Contexts of 128 bytes, and 0.15 to 0.6 MB of text. FoX's loss beyond its training context does not change "
            "with rate or tokens: nothing that three digits show is added anywhere. The Transformer's rises with both, "
            "from 0.00 after half the tokens at the lowest rate to 1.2 nats after twice as many at the highest. FoX "
            "is ahead at each of the nine places, at the highest rate after twice the tokens by no more than the seeds "
            "differ (p = 0.21). Nobody finds a needle.",
        ),
        Measured(
            "gpu", "2026-11-30", "one of two NVIDIA H200, 14 runs at a time", "2026-11-30-fox_sensitivity-gpu.json",
            "6.6 to 26 million tokens in contexts of 4096. FoX is ahead at eight of nine places, by 0.19 (p = 0.12) to "
            "0.57 nats; at the lowest rate after twice the tokens neither is (p = 0.55). Beyond the training context "
            "FoX loses nothing, and gains 0.014 nats at the highest rate after twice the tokens; the Transformer loses "
            "0.02 to 0.03 after half the tokens, 0.09 to 0.14 after all, 0.14 to 0.26 after twice as many. Of a "
            "needle's tokens a fifth at most are right, after twice the tokens and where it ends the context.",
        ),
    ),
)  # fmt: skip
