"""Parts shared by the experiments on One-Pass Forgetting: rules for probes, and arms that train forget networks
alone."""

from collections.abc import Mapping
from dataclasses import replace

from attnzoo.experiments.claims import Below, Value
from attnzoo.experiments.experiment import Arm, Overlay, Size, training

# probes of what is lost by a forget network, by position, and by what later rows need
NETWORK, WINDOW, LATER = "network", "window", "later use"
RULES = {"sinks + window": "sinks", "H2O": "h2o", "SnapKV": "snapkv", LATER: "utility"}
ALONE = ("forgetting={alone: true, distill_steps: 1000000, budget: 0.0}",)


def network(
    name: str, after: str, settings: tuple[str, ...] = ALONE, at: Mapping[str, Mapping[str, object]] | None = None,
    **options: object,
) -> Arm:  # fmt: skip
    """An arm that trains forget networks beside the frozen weights of the arm ``after``, by default in one phase.

    Args:
        at: size -> options of the network at that size.
        options: options of the network, beside those of all arms.
    """
    given = {"window": 2, "width": 16, **options}
    own = {size: {"forgetting": {**given, **changed}} for size, changed in (at or {}).items()}
    return Arm(name, after, {"forgetting": given}, settings, (0.01,), after, own)


def ahead(arm: str, other: str, probe: str, share: float) -> Below:
    """The claim that with a share of the keys an arm's network loses less than another arm by ``probe``'s rule."""
    return Below(Value(arm, NETWORK, share), Value(other, probe, share), paired=True)


def reaching(tokens: int) -> float:
    """The discount gamma with which utility looks ``tokens`` tokens ahead on average."""
    return 1 - 1 / tokens


def text_sizes(cpu: tuple[str, ...], **others: Size) -> dict[str, Size]:
    """Sizes of models that learn a text, beside whose weights forget networks are trained.

    Args:
        cpu: `key=value` of the networks' training on a CPU.
        others: the other sizes, by name.
    """
    settings = training(600, 8, 256, "hidden_size: 64, num_layers: 2, num_heads: 2", warmup=30, eval_tokens=4096)
    return {"cpu": Size(settings, (0.004,), tokens=4096, after=cpu), **others}


def on_gpu(context: int, heads: int, rows: int, tokens: int, after: tuple[str, ...], steps: int = 400) -> Size:
    """Models of four layers and 256 channels, which learn 16384 bytes a step.

    Args:
        context: tokens of a row.
        heads: heads of a layer. The targets of forget networks cost context^2 times heads per step.
        rows: rows of a batch.
        tokens: held-out tokens that each probe reads.
        after: `key=value` of the networks' training.
    """
    settings = training(
        steps, rows, context, f"hidden_size: 256, num_layers: 4, num_heads: {heads}", warmup=40, eval_tokens=65536,
        last=("mixed_precision=bf16",),
    )  # fmt: skip
    return Size(settings, (0.002,), tokens=tokens, after=after)


def part_by_part(ahead: int, lr: float = 0.01) -> tuple[Arm, ...]:
    """Forget networks in two phases beside the weights of the arm `rope`, each with one thing changed: the ablations of
    "One-Pass Forgetting", section 4.

    Args:
        ahead: tokens that the discount looks ahead at size `gpu`; on a CPU 20.
        lr: learning rate of the arm that continues training all weights.
    """

    def arm(name: str, *settings: str, at: Mapping[str, Mapping[str, object]] | None = None, **options: object) -> Arm:
        return network(name, "rope", ("forgetting.alone=true", *settings), at, **{"budget": 0.15, **options})

    return (
        arm("key"),
        arm("pair", network="pair"),
        arm("attention", network="attention"),
        arm("decay", network="decay"),
        arm("plain maximum", pool="max"),
        arm("plain soft maximum", pool="softmax"),
        arm("discount", discount=reaching(20), at={"gpu": {"discount": reaching(ahead)}}),
        arm("sharp from the start", "forgetting.temperature=64"),
        arm("shallow layers first", "forgetting.order=shallow_first"),
        arm("deep layers first", "forgetting.order=deep_first"),
        arm("pair, free", network="pair", monotone=False),
        arm("learned budget", learned_budget=True),
        arm("budget of half", budget=0.5),
        arm("no second phase", "forgetting.distill_steps=1000000"),
        replace(arm("all weights", "forgetting.alone=false"), lrs=(lr,)),
    )


def one_thing_changed(axis: str) -> tuple[Overlay, ...]:
    """Figures of the arms of :func:`part_by_part`, beside two rules of the arm `rope`; ``axis`` labels the numbers."""
    return tuple(
        Overlay(
            f"{title}: one thing changed", axis,
            (*((rule, "rope", rule) for rule in (WINDOW, LATER)), ("as it is", "key", NETWORK),
             *((name, name, NETWORK) for name in names)),
        )
        for title, names in (
            ("What the network looks at, monotone or free", ("pair", "attention", "decay", "pair, free")),
            ("What it learns from", ("plain maximum", "plain soft maximum", "discount", "no second phase")),
            ("How it is trained", ("sharp from the start", "shallow layers first", "deep layers first",
                                   "learned budget", "budget of half", "all weights")),
        )
    )  # fmt: skip
