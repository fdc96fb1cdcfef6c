"""An experiment: recall of a key's latest value, where keys are given new values."""

from attnzoo.experiments.claims import below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Size, training
from attnzoo.experiments.probes import Wrong

PAPER = "Arora et al., Zoology (2023), for recall; Lin et al., Forgetting Transformer (2025), section 3, for the gate"
WRONG = "wrong answers"
OPEN = {"gate_bias": 5.0}  # where a forget gate starts: it takes 0.7% from a token's past

EXPERIMENT = Experiment(
    title="Recall of the last value: gates matter",
    question=(
        "Keys with values come first, some keys get another value, then each key is asked for its last one. What has "
        "no gate and no delta rule sees the old value and the new one alike; a forget gate prefers what is near, the "
        "delta rule writes over. Gates are alike on both sides, and open at first."
    ),
    arms=(
        Arm("nope", "nope"),
        Arm("fox", "fox", OPEN),
        Arm("path", "path"),
        Arm("path_fox", "path_fox", OPEN),
        Arm("linear_attention", "linear_attention"),
        Arm("mamba2", "mamba2", {"gate": "forget", **OPEN}),
        Arm("deltanet", "deltanet"),
        Arm("gated_deltanet", "gated_deltanet", {"gate": ["forget", "delta"], **OPEN}),
    ),
    settings=("data.source=task:forgetting_mqar",),
    options={"block": "pro"},
    sizes={
        "cpu": Size(
            settings=(
                "data.task_options={vocab_size: 64, pairs: 5, updates: 3}", "steps=600", "batch_size=32",
                "data.context_length=26", "log_every=100", "eval_tokens=8192", "optimizer.warmup_steps=100",
                "model={hidden_size: 64, num_layers: 1, num_heads: 2, attention_options: {head_dim: 8, value_dim: 8}}",
            ),
            lrs=(0.002, 0.005),
        ),
        "gpu": Size(
            training(1500, 64, 160, "hidden_size: 128, num_layers: 2, num_heads: 2", warmup=200, eval_tokens=65536,
                     log_every=200, first=("data.task_options={vocab_size: 1024, pairs: 32, updates: 16}",)),
            lrs=(0.001, 0.003), rows=1024,
        ),
    },
    probes=(Wrong(WRONG), Wrong("wrong without updates", {"updates": 0}, lengths=(0.8,))),
    expectations=(
        Expectation(
            "On the softmax side a forget gate or PaTH's transition answers more than no position encoding.",
            PAPER, below(WRONG, ("fox", "nope"), ("path", "nope")),
        ),
        Expectation(
            "On the linear side a gate or the delta rule answers more than neither.",
            PAPER, below(WRONG, ("mamba2", "linear_attention"), ("deltanet", "linear_attention")),
        ),
        Expectation(
            "The softmax sides answer more than their duals, whose state is of fixed size.",
            "Arora et al., Zoology (2023), Figure 2, for recall without updates",
            below(WRONG, ("fox", "mamba2"), ("path", "deltanet")),
        ),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-23", "two busy cores of an AMD EPYC", "2026-11-23-forgetting_recall-cpu.json",
            "Six seeds, decided after three had left the claim on the linear side undecided (Mamba-2 31% wrong, "
            "linear attention 38%, p = 0.066). Before, with K = 32, Mamba-2 with its own gate had 4% wrong beside "
            "31% of linear attention (seen), but FoX beside Mamba-2 was undecided: such a state holds five keys, and"
            " on rows of 32 tokens random tokens gave another value to 1.1% of the keys. With K = 8 and its own gate"
            " Mamba-2 had 14%, 27% and 90% wrong.",
        ),
        Measured(
            "gpu", "2026-11-23", "one NVIDIA H200, beside other work", "2026-11-23-forgetting_recall-gpu.json",
            "After 15M tokens two layers without a position encoding know which value is the last one (0.004% wrong; "
            "FoX 0.04%, PaTH none), so nothing is left to gain on the softmax side. The delta rule is right too "
            "(0.03%); Mamba-2 is not ahead of linear attention, whose three seeds have 8%, 29% and 35%.",
        ),
    ),
)  # fmt: skip
