"""An experiment: the seven ablations of One-Pass Forgetting's forget network, beside one trained model."""

from attnzoo.experiments.claims import All, at_most, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Size
from attnzoo.experiments.forgetting_arms import LATER, NETWORK, WINDOW, ahead, one_thing_changed, part_by_part
from attnzoo.experiments.forgetting_probes import KeysHeld, WrongWithin

PAPER = "One-Pass Forgetting, section 4, ablation {}"
FREELY, HELD = "wrong, forgotten by itself", "keys held by itself"
SHARES = (0.03125, 0.0625, 0.09375, 0.125, 0.25)
TIGHT = 0.0625

EXPERIMENT = Experiment(
    title="Learned forgetting, part by part",
    question=(
        "One RoPE model per seed has learnt to find a number among random words. Forget networks are then trained "
        "beside its frozen weights in two phases, each with one thing changed: what the network looks at (1), how "
        "utilities are pooled (2), annealing (3), its order over the layers (4), the running minimum (5), the budget "
        "(6), the second phase (7). What is still found when a head may hold only so many keys, and when the "
        "networks decide by themselves how many that are?"
    ),
    arms=(Arm("rope", "rope"), *part_by_part(160)),
    options={"block": "pro"},
    settings=("data.source=task:needle",),
    sizes={
        "cpu": Size(
            settings=(
                "data.task_options.digits=2", "batch_size=16", "data.context_length=64", "log_every=100",
                "eval_tokens=4096", "model={hidden_size: 64, num_layers: 2, num_heads: 2}", "steps=700",
                "optimizer.warmup_steps=50",
            ),
            lrs=(0.003,),
            rows=128,
            after=("steps=200", "optimizer.warmup_steps=10", "forgetting={distill_steps: 80, anneal_steps: 60}"),
        ),
        "gpu": Size(
            settings=(
                "data.task_options.digits=4", "batch_size=32", "data.context_length=512", "log_every=200",
                "eval_tokens=65536", "model={hidden_size: 256, num_layers: 4, num_heads: 4}", "steps=1500",
                "optimizer.warmup_steps=200",
            ),
            lrs=(0.001,),
            rows=128,
            after=(
                "steps=150", "batch_size=8", "optimizer.warmup_steps=10",
                "forgetting={distill_steps: 60, anneal_steps: 50}",
            ),
        ),
    },
    probes=(
        WrongWithin(NETWORK, "retention", SHARES),
        WrongWithin(WINDOW, "window", SHARES),
        WrongWithin(LATER, "utility", SHARES),
        WrongWithin(FREELY, "forgets"),
        KeysHeld(HELD, "forgets"),
    ),
    expectations=(
        Expectation("The network finds more than a window at every limit.", PAPER.format(1).partition(", ablation")[0],
                    All(tuple(ahead("key", "rope", WINDOW, share) for share in SHARES[2:]))),
        Expectation("A network of keys alone is not worse than one of pairs (by 2% of the answers).", PAPER.format(1),
                    below(NETWORK, ("key", "pair"), at=TIGHT, by=-0.02, paired=True)),
        Expectation("Forgotten by itself, it is found with a quarter of the keys (under 5% wrong).", PAPER.format(6),
                    All((at_most(0.05, FREELY, "key"), at_most(0.25, HELD, "key")))),
        Expectation("Without annealing, sharp from the start, more is missed.", PAPER.format(3),
                    ahead("key", "sharp from the start", NETWORK, TIGHT)),
        Expectation("What may be remembered again is missed more often where it is gone.", PAPER.format(5),
                    ahead("pair", "pair, free", NETWORK, TIGHT)),
        Expectation("Without a second phase more is missed.", PAPER.format(7),
                    ahead("key", "no second phase", NETWORK, TIGHT)),
    ),
    overlays=one_thing_changed("wrong answers"),
    measured=(
        Measured("cpu", "2026-11-23", "two busy cores of an Intel Xeon", "2026-11-23-forgetting_ablations-cpu.json"),
        Measured(
            "gpu", "2026-11-23", "one NVIDIA H200, twelve runs at a time", "2026-11-23-forgetting_ablations-gpu.json",
            "With a sixteenth of the keys a network of keys misses 2% in every seed, one of pairs 0.4% to 13%, one "
            "sharp from the start 3% to 75%, one with a dot product 5% to 54%: the seeds differ by too much for a "
            "test of three.",
        ),
    ),
)  # fmt: skip
