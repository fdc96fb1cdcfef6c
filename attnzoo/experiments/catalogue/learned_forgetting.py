"""Which keys may go: what a forget network learns, beside rules that nobody has to learn, at equal memory."""

from attnzoo.experiments.claims import All, AtMost, Below, Value
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Size
from attnzoo.experiments.probes import AddedLoss, KeysHeld, Loss

PAPER = "One-Pass Forgetting, section 4"
NETWORK, LATER, FREELY, HELD = "network", "later use", "forgotten by itself", "keys held by itself"
PLAIN = ("forgetting={distill_steps: 300, anneal_steps: 300}",)  # the defaults, of what does not forget
RULES = {"window": "window", "sinks": "sinks + window", "h2o": "H2O", "snapkv": "SnapKV"}


def arm(name: str, *settings: str, variant: str = "rope", **options: object) -> Arm:
    """A model that forgets, in two phases of a third of the steps each, as the size says."""
    return Arm(name, variant, {"forgetting": {"window": 8, "width": 16, **options}}, settings)


EXPERIMENT = Experiment(
    title="Learned forgetting at equal memory",
    question=(
        "A head may hold M keys. Which go first? By position (a window, attention sinks beside it), by the attention "
        "that they got (H2O, SnapKV), by what a forget network has learnt, or, as a bound, by what later rows will "
        "need. The loss that is added over holding all keys, on held-out text, for each model and limit. Ablations of "
        "the network: what it looks at, how utilities are pooled, annealing, its order over layers, the running "
        "minimum, the budget, the second phase."
    ),
    arms=(
        arm("fox, key", variant="fox"),
        Arm("fox", "fox", settings=PLAIN),
        Arm("rope", "rope", settings=PLAIN),
        arm("key"),
        arm("pair", network="pair"),
        arm("attention", network="attention"),
        arm("decay", network="decay"),
        arm("plain maximum", pool="max"),
        arm("plain soft maximum", pool="softmax"),
        arm("discount", discount=0.98),
        arm("no annealing", "forgetting.temperature=64"),
        arm("shallow layers first", "forgetting.order=shallow_first"),
        arm("free retention", monotone=False),
        arm("learned budget", learned_budget=True),
        arm("no second phase", "forgetting.distill_steps=1000000"),
    ),
    options={"qk_norm": "rms"},
    settings=("data.source=stdlib",),
    sizes={
        "cpu": Size(
            settings=(
                "steps=200", "batch_size=8", "data.context_length=128", "log_every=100", "eval_tokens=4096",
                "model={hidden_size: 64, num_layers: 2, num_heads: 2}", "optimizer.warmup_steps=30",
                "forgetting={distill_steps: 70, anneal_steps: 70}",
            ),
            lrs=(0.004,),
            tokens=4096,
        ),
        "gpu": Size(
            settings=(
                "steps=4000", "batch_size=16", "data.context_length=4096", "log_every=200", "eval_tokens=65536",
                "model={hidden_size: 256, num_layers: 4, num_heads: 4}", "optimizer.warmup_steps=200",
                "mixed_precision=bf16", "forgetting={distill_steps: 1300, anneal_steps: 1300}",
            ),
            lrs=(0.002,),
            tokens=32768,
        ),
    },
    probes=(
        Loss(),
        AddedLoss(NETWORK, "retention"),
        AddedLoss(LATER, "utility"),
        *(AddedLoss(name, rule) for rule, name in RULES.items()),
        AddedLoss(FREELY, "forgets"),
        KeysHeld(HELD, "forgets"),
        KeysHeld("keys held, certified", "certified"),
    ),
    expectations=(
        Expectation("Half of the keys are gone for less than 1% of perplexity.", PAPER,
                    All((AtMost(Value("key", FREELY), 0.00995), AtMost(Value("key", HELD), 0.5)))),
        Expectation("At a quarter of the context the network adds less loss than a window in its own model.", PAPER,
                    Below(Value("key", NETWORK, 0.25), Value("key", "window", 0.25))),
        Expectation("And less than attention sinks with a window.", PAPER,
                    Below(Value("key", NETWORK, 0.25), Value("key", "sinks + window", 0.25))),
        Expectation("And less than H2O.", PAPER, Below(Value("key", NETWORK, 0.25), Value("key", "H2O", 0.25))),
        Expectation("The second phase helps at an eighth of the context.", PAPER,
                    Below(Value("key", NETWORK, 0.125), Value("no second phase", NETWORK, 0.125))),
    ),
    maps=(NETWORK, LATER, *RULES.values()),
)  # fmt: skip
