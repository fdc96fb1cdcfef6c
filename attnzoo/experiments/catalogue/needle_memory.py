"""A number in a haystack, while a head may hold only so many keys."""

from attnzoo.experiments.claims import AtMost, Below, Value
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Size
from attnzoo.experiments.probes import WrongWithin

PAPER = "One-Pass Forgetting, section 4 (retrieval on long dependencies)"
NETWORK, WINDOW = "network", "window"
FORGETTING = {"forgetting": {"window": 4, "width": 16, "budget": 0.3}}

EXPERIMENT = Experiment(
    title="Needle in a haystack within a memory",
    question=(
        "A number stands somewhere among random words; the row ends in the question for it. What is still found when a "
        "head may hold only a part of the row, and who says which keys go: their position, the attention they got, or "
        "a forget network? The rules look at no later row; what the question asks for, they have to guess."
    ),
    arms=(
        Arm("rope, key", "rope", FORGETTING),
        Arm("fox, key", "fox", FORGETTING),
        Arm("nope, pair", "nope", {"forgetting": {**FORGETTING["forgetting"], "network": "pair"}}),
    ),
    options={"block": "pro"},
    settings=("data.source=task:needle", "forgetting.blend=0.3"),
    sizes={
        "cpu": Size(
            settings=(
                "data.task_options.digits=2", "steps=700", "batch_size=16", "data.context_length=64", "log_every=100",
                "eval_tokens=16384", "model={hidden_size: 64, num_layers: 2, num_heads: 2}",
                "optimizer.warmup_steps=50", "forgetting={distill_steps: 400, anneal_steps: 150}",
            ),
            lrs=(0.003,),
            rows=64,
        ),
        "gpu": Size(
            settings=(
                "data.task_options.digits=4", "steps=3000", "batch_size=64", "data.context_length=1024",
                "log_every=200", "eval_tokens=262144", "model={hidden_size: 256, num_layers: 4, num_heads: 4}",
                "optimizer.warmup_steps=200", "forgetting={distill_steps: 1000, anneal_steps: 1000}",
            ),
            lrs=(0.001,),
            rows=256,
        ),
    },
    probes=(
        WrongWithin(NETWORK, "retention"),
        WrongWithin("later use", "utility"),
        WrongWithin(WINDOW, "window"),
        WrongWithin("sinks + window", "sinks"),
        WrongWithin("H2O", "h2o"),
        WrongWithin("SnapKV", "snapkv"),
    ),
    expectations=(
        Expectation("With all keys it is found (under 10% wrong).", PAPER,
                    AtMost(Value("rope, key", WINDOW, 1.0), 0.1)),
        Expectation("With half of them the network still finds it more often than a window.", PAPER,
                    Below(Value("rope, key", NETWORK, 0.5), Value("rope, key", WINDOW, 0.5))),
        Expectation("And more often than H2O.", PAPER,
                    Below(Value("rope, key", NETWORK, 0.5), Value("rope, key", "H2O", 0.5))),
    ),
    maps=(NETWORK, "later use", WINDOW, "sinks + window", "H2O", "SnapKV"),
)  # fmt: skip
