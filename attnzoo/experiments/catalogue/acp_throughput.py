"""Training with and without pruning, by context: the headline of the paper on adaptive computation pruning."""

from dataclasses import replace

from attnzoo.experiments.catalogue.pairs import PACKAGES, size
from attnzoo.experiments.claims import All, AtLeast, Below, Value, at_most, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Grid, Measured, Size
from attnzoo.experiments.probes import KeptBlocks, Loss, PrunedLoss, Speed
from attnzoo.experiments.text_probes import ByEps, KeptByDepth, KeptByHead, Needle

PAPER = "Lin et al., Adaptive Computation Pruning for the Forgetting Transformer (2025)"
CONTEXTS = (4096, 8192, 16384)
PRUNED = {"plain": {}, "ACP": {"acp": True}}


def name_of(kind: str, tokens: int) -> str:
    return f"{tokens // 1024}k, {kind}"


def heads(kept: float) -> Value:
    """The share of the heads in a quarter of blocks kept."""
    return Value(name_of("ACP", CONTEXTS[-1]), KeptByHead().name, kept)


LOSS_BY_EPS, KEPT_BY_EPS = ByEps("loss added by eps", "change"), ByEps("blocks kept by eps", "kept")
DEFAULT_EPS, LARGE_EPS = LOSS_BY_EPS.at[1], LOSS_BY_EPS.at[-2]


def model(width: int, layers: int, steps: int = 120) -> Size:
    """A size of `pairs`, 8 million tokens in each context, and fewer held-out ones."""
    return replace(size(width, layers, steps, 2e-3, settings=("eval_tokens=131072",)), tokens=2**17, rows=32)


EXPERIMENT = Experiment(
    title="Training with pruning",
    question=(
        "FoX (Pro) trained with and without pruning by certificate, at three sizes (3, 10 and 25 million weights), in "
        "contexts of 4096, 8192 and 16,384 tokens with as many tokens a step, with the gates that these runs learn in "
        "120 steps: how fast, what is kept, and what it costs in loss. Speeds compare where each GPU trains one model "
        "at a time: `--jobs` with the number of GPUs; the smallest model waits for the host, and what the GPU alone "
        "gains is `attnzoo bench acp`'s. Heads that look back take more steps: after `steps=950` such models copy."
    ),
    arms=tuple(
        Arm(name_of(kind, T), "fox", options, settings=(f"data.context_length={T}", f"batch_size={65536 // T}"))
        for T in CONTEXTS for kind, options in PRUNED.items()
    ),
    settings=PACKAGES,
    options={"block": "pro"},
    sizes={
        "cpu": Size(
            settings=(
                "steps=2", "data.source=stdlib", "log_every=1", "model={hidden_size: 32, num_layers: 2, num_heads: 2}",
                "optimizer.warmup_steps=1", "eval_tokens=16384",
            ),
            lrs=(6e-3,), tokens=32768, rows=2,
        ),
        "gpu": model(256, 4), "gpu-10m": model(384, 6), "gpu-25m": model(512, 8),
        "gpu-950": model(256, 4, 950),  # steps after which heads look back
    },
    probes=(Speed(), Loss(), KeptBlocks(lengths=(1.0,), block=64), KeptByHead(), KeptByDepth(), PrunedLoss(length=1.0),
            Needle(), LOSS_BY_EPS, KEPT_BY_EPS, ByEps("milliseconds by eps", "seconds")),
    expectations=(
        *(Expectation(f"Training is faster with pruning in a context of {T} tokens.",
                      f"{PAPER}, Figure 2: 10 to 40% with 4k to 16k tokens",
                      below("training speed", (name_of("plain", T), name_of("ACP", T))))
          for T in CONTEXTS),
        Expectation("Pruning costs less than a fiftieth of a nat.", f"{PAPER}, Figure 3",
                    below("loss", *((name_of("ACP", T), name_of("plain", T)) for T in CONTEXTS), by=-0.02,
                          paired=True)),
        Expectation("It drops half of the blocks of the training context, or more.", f"{PAPER}, Figure 2",
                    at_most(0.5, "blocks kept", *(name_of("ACP", T) for T in CONTEXTS))),
        Expectation("A head is local or global, and there are both: of 16,384 tokens more heads keep less than a "
                    "quarter of the blocks, and more, at least a twentieth, keep over three quarters, than a share in "
                    "either quarter between.", f"{PAPER}, Figure 4",
                    All((AtLeast(heads(1.0), 0.05),
                         *(Below(heads(inner), heads(outer)) for inner in (0.5, 0.75) for outer in (0.25, 1.0))))),
        Expectation("The first layers are local: in the mean of its heads the first quarter of the layers keeps less "
                    "than a quarter of the blocks of 4096 tokens.", f"{PAPER}, Figure 5: the first two of 24",
                    at_most(0.25, KeptByDepth().name, name_of("ACP", CONTEXTS[0]), at=0.25)),
        Expectation("A hundredth of a row's weight in place of e^-10 saves less than a tenth of the blocks.",
                    f"{PAPER}, Figure 7",
                    Below(Value(name_of("ACP", CONTEXTS[-1]), KEPT_BY_EPS.name, DEFAULT_EPS),
                          Value(name_of("ACP", CONTEXTS[-1]), KEPT_BY_EPS.name, LARGE_EPS), by=-0.1)),
        Expectation("The needle is found as well with pruning (within a twentieth).", f"{PAPER}, Figures 3 and 9",
                    All(tuple(Below(Value(name_of("ACP", T), Needle().name, depth),
                                    Value(name_of("plain", T), Needle().name, depth), by=-0.05, paired=True)
                              for T in CONTEXTS for depth in Needle().at))),
    ),
    grids=tuple(
        Grid(title, tuple(PRUNED), tuple(f"{T} tokens" for T in CONTEXTS),
             tuple(tuple(name_of(kind, T) for T in CONTEXTS) for kind in PRUNED), probe)
        for title, probe in (("thousand tokens trained per second", "training speed"), ("loss", "loss"))
    ),
    measured=(
        Measured(
            "gpu", "2026-11-29", "one NVIDIA H200 of a host whose other one trained other models",
            "2026-11-29-acp_throughput-gpu.json",
            "Two seeds of models with 3 million weights, of whose speed (thousand tokens a second) nothing can be "
            "said: without pruning a step takes 28, 27 and 29 ms in the three contexts, so it waits for the host and "
            "not for attention, whose kernels would take 5, 9 and 18 ms of it, and 2 ms with pruning, by the times "
            "that `bench acp` has of 25 million weights and four times the heads. Speeds have a standard deviation of "
            "5% between seeds, by which a gain under 28% would mostly go unseen. After 120 steps gates forget about "
            "as they began. Of blocks of 128 rows by 64 keys 10.1%, 5.1% and 2.5% are kept, little more than each "
            "row's own block and the 64 keys before it, 9.0%, 4.6% and 2.3%: all heads are local, in all layers, for "
            "every eps. After 950 steps such a model keeps three times as many of 4096 tokens (`gpu-950`). So such "
            "models were bound to confirm that half is dropped, that the first layers are local and that a larger eps "
            "saves little, to have no global head and to find no needle. That a twentieth of the heads must be "
            "global was added when the numbers were in; without it the claim of two humps stays open where one of "
            "them is empty. The losses of a seed with and without pruning differ by 0.03 nats at most, either way. "
            "What pruning adds to a model's loss was measured in batches that the kernels do not prune at 4096 "
            "tokens, and of eps at 8192, too; the milliseconds are those of one window in float32. Later runs measure "
            "both in batches as large as in training.",
            seeds=2,
        ),
        Measured(
            "gpu-950", "2026-11-29",
            "one NVIDIA H200, 4 runs at a time, of a host whose other three trained other models",
            "2026-11-29-acp_throughput-gpu-950.json",
            "Two seeds of models with 3 million weights, after 62 million tokens, whose heads have learnt to look "
            "back. Speeds (thousand tokens a second) are those of four trainings that share a GPU, not of one alone, "
            "and the claims that training is faster were judged by them. With pruning they are 1.32 times as high in "
            "contexts of 4096 tokens and 1.54 times in those of 8192; at 16,384 the seeds differ too much (561 and 726 "
            "without, 1126 and 1906 with it): the second ones were the last to end, when fewer ran beside them. Kept "
            "are 24%, 18% and 14% of the blocks. Of the sixteen heads of a pruned model 12 or 13 keep less than a "
            "quarter of them, two keep more than three quarters (one at 16,384 tokens), and one or two stand between. "
            "So there are local heads and global ones, but one global head is no hump: that claim is open. No global "
            "head is in the first layer, which keeps 11%, 6% and 3%. Of 16,384 tokens an eps of a hundredth in place "
            "of e^-10 saves 1.3% of all blocks, a tenth of those that are kept. With pruning 3% to 4% of the needle's "
            "tokens are wrong where it stands right before the question, 9% to 24% in the row's middle, and at its "
            "beginning 30%, 48% and 73%; two seeds of 32 rows do not tell whether pruning costs a twentieth. The "
            "losses of a seed with and without pruning differ by 0.013 nats at most, and pruning adds less than 1e-8 "
            "to the loss of a trained model. The milliseconds by eps were taken while other models trained, and say "
            "nothing.",
            seeds=2,
        ),
    ),
)  # fmt: skip
