"""The configuration of a training run: model, data, optimizer, checkpoints and logging."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnzoo.data.config import DataConfig
from attnzoo.errors import above, at_least, finite, one_of
from attnzoo.models.config import ModelConfig
from attnzoo.registry import get


def check_folder_name(output_dir: str) -> None:
    """Raise ValueError if ``output_dir`` names no folder, or one in a home folder that nobody will look for there."""
    if not output_dir:
        raise ValueError("output_dir must name a folder, got an empty text")
    if output_dir.startswith("~"):
        raise ValueError(f"output_dir: ~ does not stand for a home folder here: write it out, got {output_dir!r}")


def check_context_parallel(model: ModelConfig, processes: int, section: str = "model") -> None:
    """Raise ValueError if layers need whole sequences, which several processes do not have."""
    for spec in model.layers():
        if get(spec.name).side == "other":
            raise ValueError(
                f"{section}.attention: expected no {spec.name!r} with context_parallel={processes}, as its readout "
                "needs whole sequences"
            )
        for option in ("forgetting", "training_groups"):
            if spec.options.get(option) is not None:
                place = "attention_options" if option in model.attention_options else "attention"
                raise ValueError(
                    f"{section}.{place}: expected no {option} of {spec.name!r} with context_parallel={processes}, as "
                    f"it needs whole sequences, got {spec.options[option]!r}"
                )


@dataclass
class Extension:
    """The learning rate of a run's extension: from the rate at its checkpoint linearly to `lr`, then constant or along
    a cosine to 0.

    Args:
        after: the number of updates before the extension, at its checkpoint.
        planned: the number of updates of the run before it was extended.
        schedule: `constant` or `cosine`.
        lr: the learning rate to reach.
        warmup_steps: updates from the old rate to `lr`.

    Raises:
        ValueError: a number out of range or an unknown word.
    """

    after: int
    planned: int
    schedule: str
    lr: float
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "after")
        at_least(self, self.after, "planned")
        one_of(self, "schedule", ["constant", "cosine"])
        above(self, 0.0, "lr")
        finite(self, "lr")
        at_least(self, 0, "warmup_steps")


@dataclass
class OptimizerConfig:
    """AdamW or Muon, with a linear warm-up and a cosine, as in the Forgetting Transformer (Lin et al. 2025,
    appendix B).

    Args:
        name: `adamw`, or `muon`: Muon for the matrices of linear layers, with AdamW's size of an update, and AdamW for
            gates, embeddings, the head and all that is no matrix. `beta1` is Muon's momentum.
        lr: the peak of the learning rate, reached after `warmup_steps`.
        beta1: decay of the mean of the gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the latter.
        weight_decay: not on norms, biases and other one-dimensional parameters.
        clip_norm: the norm over all parameters to which gradients are clipped; infinity for no clipping.
        warmup_steps: of the linear rise; must be below the run's `steps`.
        min_lr: where the rise begins and the cosine ends, below `lr`.
        extensions: how the run was made longer, oldest first; `attnzoo extend` writes them.

    Raises:
        ValueError: a number out of range.
    """

    name: str = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 100
    min_lr: float = 0.0
    extensions: list[Extension] = field(default_factory=list)

    def __post_init__(self) -> None:
        above(self, 0.0, "lr", "eps", "clip_norm")
        at_least(self, 0, "weight_decay", "warmup_steps", "min_lr")
        finite(self, "lr", "eps", "weight_decay")
        one_of(self, "name", ["adamw", "muon"])
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: expected at most lr={self.lr:g}, got {self.min_lr:g}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {getattr(self, name)}")


@dataclass
class ForgettingConfig:
    """The schedule of One-Pass Forgetting (sections 2.4 and 2.5), for a model with such layers.

    In phase 1 the forget networks learn from the teacher. In phase 2 lambda and tau move to the values in the layers'
    options, the weight of the distillation moves to 0, and the loss of the task trains the networks.

    Args:
        distill_steps: updates of phase 1.
        anneal_steps: updates over which phase 2 moves the values; 0 for at once.
        blend: lambda in phase 1, the student's share of the output.
        temperature: tau in phase 1.
        distillation: beta_r, the weight of the distillation in phase 1.
        budget: beta_b, the weight of the budget, in both phases.
        order: the order in which layers are annealed: `together`, `shallow_first` or `deep_first`.
        alone: train the forget networks and freeze all other weights; with `start_from`.

    Raises:
        ValueError: a number out of range or an unknown word.
    """

    distill_steps: int = 300
    anneal_steps: int = 300
    blend: float = 0.1
    temperature: float = 4.0
    distillation: float = 1.0
    budget: float = 1.0
    order: str = "together"
    alone: bool = False

    def __post_init__(self) -> None:
        at_least(self, 0, "distill_steps", "anneal_steps", "distillation", "budget")
        above(self, 0.0, "temperature")
        finite(self, "temperature", "distillation", "budget")
        if not 0 <= self.blend <= 1:
            raise ValueError(f"blend: expected a number in [0, 1], got {self.blend}")
        one_of(self, "order", ["together", "shallow_first", "deep_first"])


@dataclass
class TrainConfig:
    """The configuration of one training run; with the data it determines the result, whatever the number of processes.

    Args:
        output_dir: the run's folder; a run in it is continued if it is this one, and refused if it is another.
        seed: seed of the initial weights.
        start_from: a run, a folder of `attnzoo export` or `attnzoo import`, or a small model such as `fox-small`, whose
            weights the model starts from; weights that it lacks are initialised. None: all are initialised.
        objective: what the loss measures: `text`, the cross-entropy; or, against a `teacher`, `align`, the relative
            squared error of the attention outputs of the layers that differ, which alone are trained, on the teacher's
            hidden states; or `distil`, the divergence KL(teacher || model) of the next token in nats. Held-out losses
            are of the text.
        teacher: a run, a folder of `attnzoo export` or `attnzoo import`, or a small model, whose model `objective`
            compares with.
        steps: updates of the weights.
        batch_size: sequences per step, over all processes and accumulated parts.
        gradient_accumulation: parts into which each process cuts its share of a step.
        mixed_precision: `none`, or with weights and optimizer state in float32 and products in 16 bits, `bf16` or
            `fp16`; or `pure_bf16`: weights, gradients and optimizer state in bfloat16 too. Biases of gates, slopes and
            step sizes are float32 in all of them.
        compile: compile each block with `torch.compile`.
        recompute: keep only each block's input for the backward pass and compute the rest again: slower, with less
            memory.
        context_parallel: number of processes that share each sequence.
        exchange_timeout: seconds for which a process waits for the others, at the start and in each exchange, before
            it ends the run.
        sharding: `none` (each process has the whole model) or `fsdp` (each has a part of it, and of the optimizer's
            state).
        device: `auto` (what accelerate finds) or `cpu`.
        log_every: steps between rows of the metrics.
        eval_every: steps between evaluations; 0 for one at the end.
        eval_tokens: held-out tokens per evaluation, spread evenly over the held-out text.
        checkpoint_every: steps between checkpoints; 0 for one at the end.
        keep_checkpoints: the number of newest checkpoints to keep.
        progress: `auto` (a bar on a terminal, else lines), `bar`, `lines` or `quiet`.
        tensorboard: write the metrics for TensorBoard too.
        model: see `ModelConfig`.
        data: see `DataConfig`.
        optimizer: see `OptimizerConfig`.
        forgetting: see `ForgettingConfig`.

    Raises:
        ValueError: a number out of range, an unknown word, or a warm-up that never ends.
    """

    output_dir: str = "runs/default"
    seed: int = 0
    start_from: str | None = None
    objective: str = "text"
    teacher: str | None = None
    steps: int = 1000
    batch_size: int = 32
    gradient_accumulation: int = 1
    mixed_precision: str = "none"
    compile: bool = False
    recompute: bool = False
    context_parallel: int = 1
    exchange_timeout: int = 600
    sharding: str = "none"
    device: str = "auto"
    log_every: int = 10
    eval_every: int = 100
    eval_tokens: int = 65536
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    progress: str = "auto"
    tensorboard: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    forgetting: ForgettingConfig = field(default_factory=ForgettingConfig)

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "gradient_accumulation", "log_every", "eval_tokens", "keep_checkpoints")
        at_least(self, 1, "context_parallel", "exchange_timeout")
        at_least(self, 1, "batch_size", below=2**31)
        at_least(self, 0, "eval_every", "checkpoint_every")
        at_least(self, 0, "seed", below=2**32)
        check_folder_name(self.output_dir)
        one_of(self, "mixed_precision", ["none", "bf16", "fp16", "pure_bf16"])
        one_of(self, "sharding", ["none", "fsdp"])
        one_of(self, "objective", ["text", "align", "distil"])
        if (self.teacher is None) != (self.objective == "text"):
            expected = "null with objective=text" if self.teacher else f"a run or a model folder with {self.objective}"
            raise ValueError(f"teacher: expected {expected}, got {self.teacher!r}")
        if self.objective == "align" and (self.sharding == "fsdp" or self.forgetting.alone):
            both = "sharding=fsdp" if self.sharding == "fsdp" else "forgetting.alone=true"
            raise ValueError(f"objective=align trains layers one by one, beside which {both} is not served")
        if self.sharding == "fsdp" and self.mixed_precision == "fp16":
            raise ValueError("mixed_precision=fp16 scales a loss, which sharding=fsdp does not: take bf16 or none")
        if self.sharding == "fsdp" and self.mixed_precision == "pure_bf16":
            raise ValueError(
                "mixed_precision=pure_bf16 leaves gates in float32, and sharding=fsdp gathers a block's weights in one "
                "dtype: take bf16, whose float32 weights are shared out"
            )
        if self.device not in ("auto", "cpu"):
            raise ValueError(f"device: expected auto (a GPU where there is one) or cpu, got {self.device!r}")
        one_of(self, "progress", ["auto", "bar", "lines", "quiet"])
        if self.data.documents == "packed":
            for spec in self.model.layers():
                if spec.options.get("training_groups") is not None:
                    raise ValueError(
                        f"data.documents: expected joined with training_groups of {spec.name!r} (a group may hold two "
                        "documents), got 'packed'"
                    )
        if self.context_parallel > 1:
            check_context_parallel(self.model, self.context_parallel)
            if self.data.context_length < 2 * self.context_parallel:
                raise ValueError(
                    f"data.context_length: expected at least two tokens for each of context_parallel="
                    f"{self.context_parallel} processes, got {self.data.context_length}"
                )
        optimizer = self.optimizer
        ends = [*(extension.planned for extension in optimizer.extensions), self.steps]
        if optimizer.warmup_steps >= ends[0]:
            raise ValueError(
                f"optimizer.warmup_steps={optimizer.warmup_steps} must be below steps={ends[0]}: "
                "the learning rate would never reach its peak"
            )
        for number, (extension, end) in enumerate(zip(optimizer.extensions, ends[1:], strict=True)):
            if extension.after + extension.warmup_steps >= end:
                raise ValueError(
                    f"optimizer.extensions[{number}]: after={extension.after} and "
                    f"warmup_steps={extension.warmup_steps} must leave updates before step {end}"
                )

    def rows_per_part(self, processes: int) -> int:
        """The number of sequences that a process reads for one backward pass.

        Raises:
            ValueError: the batch does not divide evenly among processes (groups of them) and parts.
        """
        groups = self.groups(processes)
        parts = groups * self.gradient_accumulation
        if self.batch_size % parts:
            among = f"{processes} processes" if groups == processes else f"{groups} groups of processes"
            raise ValueError(
                f"batch_size={self.batch_size} does not divide evenly among {among} "
                f"times gradient_accumulation={self.gradient_accumulation}"
            )
        return self.batch_size // parts

    def groups(self, processes: int) -> int:
        """The number of groups of processes that share sequences.

        Raises:
            ValueError: the processes do not divide evenly into such groups.
        """
        if processes % self.context_parallel:
            raise ValueError(
                f"context_parallel={self.context_parallel}: expected a number that divides the {processes} "
                f"process{'es' * (processes > 1)} (--processes)"
            )
        return processes // self.context_parallel
