"""Every gate with and without a delta rule, on both sides."""

from attnzoo.experiments.claims import Correlated, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Grid, Measured, Size
from attnzoo.experiments.probes import Loss

FORGETTING = "Lin et al., Forgetting Transformer (2025)"
GATED_DELTA = "Yang et al., Gated Delta Networks (2025)"
DELTA = {"allow_neg_eigval": True}  # beta to 2 on both sides, and w the key
KEY = {"w": "key"}
HALF = ("mixed_precision=bf16",)
GATES = ("none", "constant", "scalar", "per channel")
# Linear side, then softmax side: without a delta rule and with one. Constants are not trained, and alike on both sides.
LINEAR = {
    "none": (Arm("linear_attention", "linear_attention"), Arm("deltanet", "deltanet", DELTA)),
    "constant": (
        Arm("retnet", "retnet", {"gate": "fixed", "rotary": None}),
        Arm("constant + delta", "gated_deltanet", {"gate": ["fixed", "delta"], **DELTA}),
    ),
    "scalar": (
        Arm("mamba2", "mamba2", {"gate": "forget"}),
        Arm("gated_deltanet", "gated_deltanet", {"gate": ["forget", "delta"], **DELTA}),
    ),
    "per channel": (Arm("gla", "gla"), Arm("kda", "kda", {"gate": ["low_rank", "delta"], **DELTA})),
}
SOFTMAX = {
    "none": (Arm("nope", "nope"), Arm("path", "path", KEY)),
    "constant": (
        Arm("alibi", "alibi", {"gate": "fixed"}),
        Arm("constant + path", "path_fox", {"gate": ["fixed", "path"], **KEY}),
    ),
    "scalar": (Arm("fox", "fox"), Arm("path_fox", "path_fox", KEY)),
    "per channel": (Arm("wall", "wall"), Arm("path_wall", "path_wall", {"gate": ["low_rank", "path"], **KEY})),
}
PAIRS = tuple(
    (linear.name, softmax.name) for gate in GATES for linear, softmax in zip(LINEAR[gate], SOFTMAX[gate], strict=True)
)
PARTS = tuple(
    (*((gate,) if gate != "none" else ()), *(("delta rule",) if delta else ())) for gate in GATES for delta in (0, 1)
)[1:]


def size(
    width: int, layers: int, steps: int, batch: int, context: int, *lrs: float, tokens: int = 65536,
    settings: tuple[str, ...] = (),
) -> Size:  # fmt: skip
    return Size(
        settings=(
            f"steps={steps}", f"batch_size={batch}", f"data.context_length={context}", "log_every=50",
            f"model={{hidden_size: {width}, num_layers: {layers}, num_heads: {max(2, width // 64)}}}",
            f"optimizer.warmup_steps={steps // 10}", f"eval_tokens={tokens // 2}", *settings,
        ),
        lrs=lrs,
        tokens=tokens,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Does what helps a recurrence help its dual?",
    question=(
        "No gate, a constant one, a scalar one, one per channel; without a delta rule and with one; as a recurrence "
        "and as its softmax dual: sixteen models in equal layers (QK-norm, shift of keys and values, output norm and "
        "gate) on the source of Python's standard library, byte by byte. The gates of a pair are alike, but GLA and "
        "Wall have their own: of low rank, and of full rank and open at first. A gain is the loss that a part takes "
        "from the model with neither gate nor delta rule on the same side."
    ),
    arms=tuple(arm for gate in GATES for side in (LINEAR, SOFTMAX) for arm in side[gate]),
    options={"block": "pro"},
    sizes={
        "cpu": size(32, 2, 300, 8, 128, 0.003, 0.01, tokens=32768),
        "cpu-medium": size(64, 2, 300, 8, 128, 0.003, 0.006, tokens=32768),
        "cpu-large": size(128, 2, 300, 8, 128, 0.002, 0.004, tokens=32768),
        "gpu": size(128, 4, 600, 32, 512, 0.001, 0.003, settings=HALF),
        "gpu-medium": size(256, 6, 500, 32, 512, 0.001, 0.002, settings=HALF),
        "gpu-large": size(512, 8, 300, 32, 512, 0.0005, 0.001, settings=HALF),
    },
    probes=(Loss(),),
    expectations=(
        Expectation("What helps a recurrence helps its dual: the gains of the two sides are correlated.",
                    "our own question; the pairs are Arshia Afzal's (2026)",
                    Correlated(PAIRS[0], PAIRS[1:], "loss", PARTS)),
        Expectation("A scalar gate helps both sides.",
                    f"{FORGETTING}, Table 3, for the softmax side; {GATED_DELTA}, for the linear side",
                    below("loss", ("mamba2", "linear_attention"), ("fox", "nope"))),
        Expectation("A gate that depends on the data is better than a constant one on both sides.",
                    f"{FORGETTING}, Figure 7, for the softmax side",
                    below("loss", ("mamba2", "retnet"), ("fox", "alibi"))),
        Expectation("The delta rule helps where there is no gate, on both sides.",
                    "Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers (2021); Yang "
                    "et al., PaTH Attention (2025)",
                    below("loss", ("deltanet", "linear_attention"), ("path", "nope"))),
        Expectation("Gate and delta rule together are better than either on the linear side.",
                    GATED_DELTA, below("loss", ("gated_deltanet", "mamba2"), ("gated_deltanet", "deltanet"))),
        Expectation("And on the softmax side.", "Yang et al., PaTH Attention (2025), PaTH-FoX",
                    below("loss", ("path_fox", "fox"), ("path_fox", "path"))),
    ),
    grids=tuple(
        Grid(f"loss, {name} side", tuple(f"gate: {gate}" for gate in GATES), ("no delta rule", "delta rule"),
             tuple(tuple(arm.name for arm in side[gate]) for gate in GATES), "loss")
        for name, side in (("linear", LINEAR), ("softmax", SOFTMAX))
    ),
    measured=(
        Measured(
            "cpu", "2026-11-22", "64 shared cores of an Intel Xeon", "2026-11-22-factorial-cpu.json",
            "The gains of the two sides correlate with r = 0.84, and 0.30 without the constant gates; with four parts "
            "to relabel p = 0.21. While pairs counted as if they shared no part, p was 0.038 and the claim seen.",
        ),
        Measured(
            "cpu-medium", "2026-11-23", "32 shared cores of an Intel Xeon", "2026-11-23-factorial-cpu-medium.json",
            "The gains correlate with r = 0.81, and 0.43 without the constant gates (p = 0.083; 0.030 as if pairs "
            "shared no part).",
        ),
        Measured(
            "cpu-large", "2026-11-23", "32 shared cores of an Intel Xeon", "2026-11-23-factorial-cpu-large.json",
            "The gains correlate with r = 0.98, and at least 0.92 without any one pair; p = 0.042 is the smallest that "
            "four parts can give.",
        ),
        Measured(
            "gpu", "2026-11-23", "one NVIDIA H200, 14 runs at a time", "2026-11-23-factorial-gpu.json",
            "After 32 times as much text as on the CPU the recurrence with neither gate nor delta rule is left at 2.2 "
            "nats per byte, its dual at 1.8 and all others between 1.2 and 1.55. So every part gains more on the "
            "linear side, and which gains most differs: the gains correlate with r = -0.82. The lowest losses are of "
            "models that look far back from the first step (ALiBi 1.21, Wall 1.23, the delta rules of the linear side "
            "1.29 and 1.30); scalar gates begin half closed (FoX 1.37, Mamba-2 1.39). `attnzoo experiment run "
            "open_gates` asks whether this is why: for FoX it is.",
        ),
    ),
)  # fmt: skip
