"""A group that is not solvable, over the number of layers."""

from attnzoo.experiments.claims import at_least, below
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Grid, Measured, Size, training
from attnzoo.experiments.probes import Wrong

MERRILL = "Merrill, Petty and Sabharwal, The Illusion of State in State-Space Models (2024), the word problem of A5"
YANG = "Yang et al., PaTH Attention (2025), synthetic tasks, the word problem of A5 by layers"
WRONG = "wrong answers"
DEPTHS = (1, 2, 4)
KINDS = {
    "delta, 2 factors": ("deltanet", {"allow_neg_eigval": True, "num_householder": 2}),
    "path": ("path", {"w_conv_size": 0}),
    "rope": ("rope", {}),
    "mamba2": ("mamba2", {}),
}


def name_of(kind: str, layers: int) -> str:
    return f"{kind}, {layers} layer{'s' if layers > 1 else ''}"


EXPERIMENT = Experiment(
    title="A5 by depth",
    question=(
        "Each token is an even permutation of five things; which one are all so far? The group is not solvable: no "
        "number of layers of attention, or of gates alone, is enough for every length, and a longer row needs more of "
        "them. Products of reflections keep it in one layer. "
        "The rows are made of three elements, whose products are all sixty; no model has a short convolution."
    ),
    arms=tuple(
        Arm(name_of(kind, layers), variant, options, (f"model.num_layers={layers}",))
        for kind, (variant, options) in KINDS.items()
        for layers in DEPTHS
    ),
    settings=(
        "data.source=task:word_problem", "data.task_options={group: A5, tokens: 3}", "optimizer.weight_decay=0.0",
    ),
    options={"conv_size": 0},
    sizes={
        "cpu": Size(
            training(600, 32, 16, "hidden_size: 64, num_heads: 2", warmup=50, eval_tokens=4096), lrs=(0.002, 0.006)
        ),
        "gpu": Size(
            training(1000, 128, 64, "hidden_size: 128, num_heads: 4", warmup=100, eval_tokens=65536, log_every=200),
            lrs=(0.002, 0.005), rows=1024,
        ),
    },
    probes=(Wrong(WRONG, lengths=(0.5, 1.0, 2.0)),),
    expectations=(
        Expectation(
            "Two factors per token are wrong less often in one layer than RoPE or Mamba-2 in four.",
            f"{MERRILL}; Siems et al., DeltaProduct (2025)",
            below(WRONG, ("delta, 2 factors, 1 layer", "rope, 4 layers"),
                  ("delta, 2 factors, 1 layer", "mamba2, 4 layers"), at=1.0),
        ),
        Expectation("PaTH needs fewer layers than RoPE: two are better than four.", YANG,
                    below(WRONG, ("path, 2 layers", "rope, 4 layers"), at=1.0)),
        Expectation("Layers help RoPE: four are better than one.", MERRILL,
                    below(WRONG, ("rope, 4 layers", "rope, 1 layer"), at=1.0)),
        Expectation("One layer of RoPE or of Mamba-2 does not solve it (over 10% wrong).", MERRILL,
                    at_least(0.1, WRONG, "rope, 1 layer", "mamba2, 1 layer", at=1.0)),
    ),
    grids=(
        Grid("wrong answers on rows as long as in training", tuple(KINDS), tuple(f"{n} layers" for n in DEPTHS),
             tuple(tuple(name_of(kind, n) for n in DEPTHS) for kind in KINDS), WRONG, 1.0),
    ),
    measured=(
        Measured(
            "cpu", "2026-11-22", "two cores of an Intel Xeon", "2026-11-22-a5-cpu.json",
            "Nor is it with a convolution before w, with two factors per token or with w the key (two layers, two "
            "seeds each): 73% to 75% wrong. Three times the steps take it to 67%.",
        ),
        Measured(
            "gpu", "2026-11-23", "one NVIDIA H200, beside other work", "2026-11-23-a5-gpu.json",
            "With as many layers PaTH is wrong on 1.5 points more than RoPE with one, and on 3.3 less with four.",
        ),
    ),
)  # fmt: skip
