"""One-Pass Forgetting beside a window, retrieval, FoX's certificate and training in groups, at equal keys."""

from attnzoo.experiments.claims import All, Below, Value, at_most, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Overlay
from attnzoo.experiments.forgetting_arms import NETWORK, WINDOW, ahead, network, reaching, text_sizes
from attnzoo.experiments.forgetting_probes import AddedInCache, AddedLoss, DecodeCost, KeysHeld, LongLoss
from attnzoo.experiments.probes import Loss

STEPS = ("steps=200",)
PAPER = "One-Pass Forgetting, section 4 (baselines)"
RETRIEVAL, CERTIFIED, HELD = "retrieval", "certified", "keys held, certified"
HEAD, LAYER, MODEL = "a budget per head", "a budget per layer", "one budget of all layers"
LONG_NETWORK, LONG_WINDOW, LONG_ALL = "long text, network", "long text, window", "long text, all keys"
SHARES = (0.0625, 0.125, 0.25)
FAR = 128.0
FORGETS, GROUPS = "rope, forgets", "rope, groups"
RULES = ((WINDOW, "window"), (RETRIEVAL, "retrieval"), (NETWORK, "retention"))

EXPERIMENT = Experiment(
    title="Learned forgetting beside its paper's baselines",
    question=(
        "The paper names sliding windows, retrieval and LongLoRA as baselines. A window, and blocks of keys retrieved "
        "by their mean key (which all stay in memory), read as many keys as a forget network leaves. LongLoRA's "
        "shifted sparse attention is a way to train, not to hold less: a RoPE model is trained in groups of 64 tokens "
        "and reads all 256 in evaluation, its weights trained whole from the start, without low-rank updates. FoX "
        "gives up what its gates certify. Budgets are per head, per layer, or one for all layers. Texts are up to "
        "32,768 bytes long. What do they add to the loss, and what does a token cost?"
    ),
    arms=(
        Arm("rope", "rope", settings=STEPS),
        Arm("fox", "fox", settings=STEPS),
        Arm(GROUPS, "rope", {"training_groups": 64}, STEPS),
        network(FORGETS, "rope", discount=reaching(10)),
    ),
    options={"block": "pro"},
    settings=("data.source=stdlib",),
    sizes=text_sizes(cpu=("steps=120", "batch_size=4", "optimizer.warmup_steps=10")),
    probes=(
        Loss(),
        *(AddedLoss(name, rule, SHARES) for name, rule in RULES),
        AddedLoss(CERTIFIED, "certified"),
        KeysHeld(HELD, "certified"),
        *(AddedInCache(name, among, (0.0625,)) for name, among in ((HEAD, "head"), (LAYER, "layer"), (MODEL, "model"))),
        LongLoss(LONG_NETWORK, "retention"),
        LongLoss(LONG_WINDOW, "window"),
        LongLoss(LONG_ALL, "", lengths=(1.0, 16.0)),
        *(DecodeCost(f"KiB held, {name}", rule, "bytes") for name, rule in RULES),
        *(DecodeCost(f"thousand operations, {name}", rule, "operations") for name, rule in RULES),
        DecodeCost("KiB held, all keys", "window", "bytes", 0.0),
        DecodeCost("thousand operations, all keys", "window", "operations", 0.0),
    ),
    expectations=(
        Expectation("With an eighth of the keys the network adds less than a window.", PAPER,
                    ahead(FORGETS, "rope", WINDOW, 0.125)),
        Expectation("And less than retrieval of as many keys.", PAPER,
                    ahead(FORGETS, "rope", RETRIEVAL, 0.125)),
        Expectation("FoX gives up half of its keys by certificate, for nothing (under 0.001 nats).",
                    "ACP's tail bound, which is proved to lose at most eps of a row's weight",
                    All((at_most(0.001, CERTIFIED, "fox"), at_most(0.5, HELD, "fox")))),
        Expectation("Trained in groups and read whole, RoPE loses less than 1% of perplexity.",
                    "Chen et al., LongLoRA (2024), Table 2, for models that were trained before",
                    below("loss", (GROUPS, "rope"), by=-0.00995, paired=True)),
        Expectation("With a sixteenth of the keys one budget of all layers adds less than one per head.",
                    "One-Pass Forgetting, section 2.4, where B_t is one number",
                    Below(Value(FORGETS, MODEL, 0.0625), Value(FORGETS, HEAD, 0.0625))),
        Expectation("And less than one per layer.", "One-Pass Forgetting, section 2.4",
                    Below(Value(FORGETS, MODEL, 0.0625), Value(FORGETS, LAYER, 0.0625))),
        Expectation("In 32,768 bytes, too, the network loses less than a window of as many keys.", PAPER,
                    Below(Value(FORGETS, LONG_NETWORK, FAR), Value("rope", LONG_WINDOW, FAR), paired=True)),
    ),
    overlays=(
        Overlay(
            "Loss at equal keys", "nats added",
            ((NETWORK, FORGETS, NETWORK), (WINDOW, "rope", WINDOW), (RETRIEVAL, "rope", RETRIEVAL),
             ("trained in groups, window", GROUPS, WINDOW), ("FoX, window", "fox", WINDOW)),
            (("FoX, certified", "fox", HELD, CERTIFIED),),
        ),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-29", "a busy core of an AMD EPYC", "2026-11-29-forgetting_baselines-cpu.json",
            "Retrieval adds half of what the network does, and keeps all keys in memory. FoX's window adds nothing, "
            "as its gates forget within it. Trained in groups of 64 bytes, RoPE reads 16 keys better than all 256: it "
            "learnt nothing farther away. One budget of all layers is not better than one per head.",
        ),
    ),
)  # fmt: skip
