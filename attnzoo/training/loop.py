"""The training loop."""

from __future__ import annotations

import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnzoo.data import Data, build_data, heldout_windows
from attnzoo.data.tasks import Examples
from attnzoo.data.windows import begins_within, heldout_starts
from attnzoo.training.checkpoint import (
    Progress,
    check_folder,
    check_resumable,
    exclusive,
    load_state,
    make_folder,
    newest_checkpoint,
    read_progress,
    remove_stale,
    write_checkpoint,
    write_config,
)
from attnzoo.training.config import TrainConfig
from attnzoo.training.exchange import keep_tokenizer, start_from
from attnzoo.training.metrics import Metrics, Row, rows_until
from attnzoo.training.model import new_model
from attnzoo.training.optimizer import learning_rate
from attnzoo.training.progress import Quiet, build_display
from attnzoo.training.rows import Rows, rows_of, rows_of_answers
from attnzoo.training.sharding import TrainState, own, prepare, whole
from attnzoo.training.throughput import Operations, blocks_kept, peak_here

if TYPE_CHECKING:
    from accelerate import Accelerator

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train(config: TrainConfig, on_row: Callable[[Row], None] | None = None) -> Path:
    """Train a model, or go on training it, and return the run folder (`config.output_dir`).

    A folder that holds checkpoints of the same configuration is continued from the newest one, to the same losses
    that an uninterrupted run has (bit for bit on a CPU with equally many threads); one that is finished is left as
    it is. Under `accelerate launch` this runs in every process, the model being replicated.

    The first SIGINT, SIGTERM or SIGHUP in a single process ends the step under way, writes a checkpoint and then
    raises KeyboardInterrupt; so does a reader of the progress who goes away. A signal that is ignored stays ignored.

    Args:
        config: the run.
        on_row: called in the main process with each row of the metrics, as it is written.

    Raises:
        ValueError, OSError: the configuration, its variants, its data or its folder are not usable.
        FloatingPointError: the loss, the gradient or a weight is not finite.
        CheckpointError: the folder holds another run, is in use, or a checkpoint could not be written.
        ModuleNotFoundError: a package of the extra `[train]` is not installed.
    """
    # Weights far in the past underflow to denormals, which a CPU multiplies many times slower than zeros.
    torch.set_flush_denormal(True)
    run_dir = Path(config.output_dir)
    check_folder(run_dir)
    accelerator = _build_accelerator(config)
    from accelerate.utils import set_seed

    rows_per_part = _rows_per_part(config, accelerator.num_processes)
    data = build_data(config.data)
    if data.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is below the {data.vocab_size} tokens of {config.data.title!r}"
        )
    set_seed(config.seed)
    model: Any = new_model(config)
    model.recompute = config.recompute

    make_folder(run_dir)
    main = accelerator.is_main_process
    with exclusive(run_dir) if main else nullcontext():
        checkpoint = check_resumable(run_dir, config, data) if main else None
        accelerator.wait_for_everyone()
        if not main:  # the first process has moved damaged checkpoints out of the way
            checkpoint = newest_checkpoint(run_dir)
        if checkpoint is None and config.start_from is not None:
            start_from(model, config.start_from, config.data)
        if config.compile:
            for block in model.blocks:
                block.compile()
            model.chunk_loss = torch.compile(model.chunk_loss)
        state = prepare(model, accelerator, config)
        progress = Progress(data_fingerprint=data.fingerprint)
        if checkpoint is not None:
            progress = replace(read_progress(checkpoint), data_fingerprint=data.fingerprint)
            load_state(state, checkpoint)
        accelerator.wait_for_everyone()
        if main:
            write_config(run_dir, config)
            keep_tokenizer(config.data, run_dir)
            remove_stale(run_dir / "checkpoints", config.keep_checkpoints)
        if progress.step < config.steps:
            run = _Run(config, state, data, rows_per_part)
            _train_from(progress, run, run_dir, on_row)
        elif main:
            rows_until(run_dir, progress.step, progress.metrics)  # says whether they are as they were written
        accelerator.wait_for_everyone()
    accelerator.free_memory()
    return run_dir


class TooLargeError(RuntimeError):
    """A step does not fit into the GPU's memory."""


class _Run:
    """One run's parts, and the three things done with them: a step, an evaluation, a check."""

    def __init__(self, config: TrainConfig, state: TrainState, data: Data, rows_per_part: int):
        self.config, self.state = config, state
        self.accelerator, self.model, self.optimizer = state.accelerator, state.model, state.optimizer
        self.data, self.rows_per_part = data, rows_per_part
        self.parts: list[Rows] = []  # of the last step

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Update once; the mean loss over the whole batch, and the norm of the gradient before clipping.

        Raises:
            FloatingPointError: a gate is no longer finite.
            TooLargeError: the GPU's memory does not hold it.
        """
        try:
            return self._step(step)
        except torch.OutOfMemoryError as error:
            raise TooLargeError(
                f"out of GPU memory at step {step}, with {self.rows_per_part} sequences of "
                f"{self.config.data.context_length} tokens at a time: raise gradient_accumulation (now "
                f"{self.config.gradient_accumulation}), set recompute=true, or take a smaller model or context"
            ) from error

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        config, accelerator = self.config, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.optimizer)
        self.model.train()
        losses = []
        norm = torch.zeros(())
        parts = self.parts = [self._part(step, part) for part in range(config.gradient_accumulation)]
        for rows, weight in zip(parts, self._weights(parts), strict=True):
            with accelerator.accumulate(self.model):
                loss = self._loss(step, rows)
                if weight is not None:
                    loss = loss * weight
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = whole(accelerator.clip_grad_norm_(self.model.parameters(), config.optimizer.clip_norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
        return accelerator.reduce(torch.stack(losses).mean(), "mean"), norm

    def _weights(self, parts: list[Rows]) -> list[Tensor | None]:
        """What the mean loss of each part is multiplied by to have the whole batch's mean as the mean over all parts
        of all processes; None where as many targets count in each of them."""
        if parts[0].cu_seqlens is None and not isinstance(self.data.train, Examples):
            return [None] * len(parts)
        accelerator = self.accelerator
        counted = torch.tensor([rows.counted for rows in parts], device=accelerator.device)
        total = accelerator.reduce(counted.sum(), "sum")
        return list(counted * (len(parts) * accelerator.num_processes) / total)

    def _loss(self, step: int, rows: Rows) -> Tensor:
        """Mean loss of a batch; weights that have run away show as gates that their forms refuse."""
        packed = {} if rows.cu_seqlens is None else {"cu_seqlens": rows.cu_seqlens}
        try:
            loss: Tensor = self.model(rows.inputs, targets=rows.targets, with_logits=False, **packed).loss
        except ValueError as error:
            if step == 1:
                raise
            raise self._diverged(step, str(error)) from error
        return loss

    def _diverged(self, step: int, what: str) -> FloatingPointError:
        lr = learning_rate(step, self.config.steps, self.config.optimizer)
        before = newest_checkpoint(self.config.output_dir)
        kept = f"the last checkpoint, {before.name}, is from before" if before else "there is no checkpoint before it"
        return FloatingPointError(f"{what} at step {step} (learning rate {lr:.3g}); {kept}")

    def _part(self, step: int, part: int) -> Rows:
        """This process's rows of a part of a batch: which rows the batch has depends on the step alone."""
        rows, accelerator, windows = self.rows_per_part, self.accelerator, self.data.train
        first = (step - 1) * self.config.batch_size + (
            part * accelerator.num_processes + accelerator.process_index
        ) * rows
        indices = range(first, first + rows)
        if isinstance(windows, Examples):
            return rows_of_answers(*windows.batch(indices)).to(accelerator.device)
        begins = None if self.data.heldout_documents is None else [windows.begins(index) for index in indices]
        return rows_of(windows.batch(indices), begins).to(accelerator.device)

    @torch.no_grad()
    def heldout_loss(self, step: int) -> float:
        """Mean loss in nats per token over the held-out windows, however many processes share them; of a task, per
        answer."""
        accelerator = self.accelerator
        count, held = self._heldout()
        # Every process runs equally many equal batches: the model synchronises them.
        together = self.rows_per_part * accelerator.num_processes
        total = torch.zeros(2, dtype=torch.float64)  # [sum of losses, tokens]
        self.model.eval()
        for first in range(0, count, together):
            mine = first + accelerator.process_index * self.rows_per_part + np.arange(self.rows_per_part)
            which = np.where(mine < count, mine, 0)  # some are there to fill a batch, and do not count
            rows = held(which, int((mine < count).sum()))
            loss = self._loss(step, rows.to(accelerator.device))
            if rows.counted:
                total += torch.tensor([float(loss) * rows.counted, rows.counted], dtype=torch.float64)
        # Two float32 numbers would not hold a sum over many tokens.
        summed = accelerator.gather(total.to(accelerator.device)[None]).sum(0)
        mean = float(summed[0] / summed[1])
        if not math.isfinite(mean):
            raise self._diverged(step, f"the held-out loss is {mean}")
        return mean

    def _heldout(self) -> tuple[int, Callable[[npt.NDArray[np.int64], int], Rows]]:
        """How many held-out rows an evaluation has, and those of some numbers, of which so many count."""
        length, tokens = self.config.data.context_length, self.config.eval_tokens
        heldout, documents = self.data.heldout, self.data.heldout_documents
        if isinstance(heldout, Examples):
            return max(1, tokens // length), lambda which, given: rows_of_answers(*heldout.batch(which.tolist()), given)
        windows = heldout_windows(heldout, length, tokens)
        starts = heldout_starts(len(heldout), length, tokens)

        def held(which: npt.NDArray[np.int64], given: int) -> Rows:
            begins = None if documents is None else [begins_within(documents, int(starts[i]), length) for i in which]
            return rows_of(windows[which], begins, given)

        return len(windows), held

    @functools.cached_property
    def peak(self) -> float | None:
        """Operations per second that the GPUs could do; said once where they are not known."""
        return peak_here(self.accelerator.device, self.accelerator.num_processes)

    def usage(self, step: int, tokens_per_second: float) -> Row:
        """The share of blocks that pruning keeps, where a layer prunes, and MFU, where the GPU's peak is known."""
        self.model.eval()
        try:
            kept = blocks_kept(self.model, self.parts[0])
        except ValueError as error:
            raise self._diverged(step, str(error)) from error
        row: Row = {}
        if kept:
            shares = torch.tensor(list(kept.values()), device=self.accelerator.device)
            kept = dict(zip(kept, self.accelerator.reduce(shares, "mean").tolist(), strict=True))
            row["blocks_kept"] = sum(kept.values()) / len(kept)
        if self.peak is not None:
            share = tokens_per_second / sum(part.inputs.numel() for part in self.parts) / self.peak
            operations = Operations(self.accelerator.unwrap_model(self.model))
            row["mfu"] = operations.per_step(self.parts, kept) * share
            row["mfu_dense"] = operations.per_step(self.parts) * share
        return row

    def check_finite(self, step: int, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """Loss and norm as numbers.

        Raises:
            FloatingPointError: one of them is not finite; a norm that is not is an update that loss scaling skips.
        """
        skipped = self.accelerator.scaler is not None  # the fused optimizer skips without telling accelerate
        for name, value in (("loss", float(loss)), ("norm of the gradient", float(norm))):
            if not math.isfinite(value) and not (name != "loss" and skipped):
                raise self._diverged(step, f"the {name} is {value}")
        return float(loss), float(norm) if math.isfinite(float(norm)) else 0.0

    def check_weights(self, step: int) -> None:
        """Refuse to save weights that no run can go on from.

        Raises:
            FloatingPointError: one of them is not finite.
        """
        finite = [own(parameter.detach()).isfinite().all() for parameter in self.model.parameters()]
        if self.accelerator.reduce((~torch.stack(finite)).sum()):  # those of any process
            raise self._diverged(step, "a weight is not finite after the update")


def _train_from(progress: Progress, run: _Run, run_dir: Path, on_row: Callable[[Row], None] | None) -> None:
    config, accelerator = run.config, run.accelerator
    main = accelerator.is_main_process
    tokens_per_step = config.batch_size * config.data.context_length

    with (
        Metrics(run_dir, progress.step, progress.metrics) if main else nullcontext() as metrics,
        build_display(config, progress.step) if main else Quiet() as display,
        _stop_requests(accelerator.num_processes == 1) as stop,
        _trackers(config, accelerator, progress.step),
    ):

        def show(update: Callable[[Any], None], what: Any) -> None:
            try:
                update(what)
            except OSError:  # the reader has gone; several processes do not stop for that, since one alone cannot
                if accelerator.num_processes == 1:
                    stop.set()

        def record(row: Row) -> None:
            if metrics is not None:
                metrics.append(row)
                show(display.row, row)
                if on_row is not None:
                    on_row(row)
            if config.tensorboard:
                numbers = {f"{row['kind']}/{key}": row[key] for key in row if key not in ("kind", "step")}
                accelerator.log(numbers, step=row["step"])

        clock, steps_timed = time.perf_counter(), 0
        for step in range(progress.step + 1, config.steps + 1):
            last = step == config.steps
            loss, norm = run.step(step)
            steps_timed += 1
            tokens = step * tokens_per_step
            logs = last or step % config.log_every == 0
            evaluates = last or _due(step, config.eval_every)
            stops = stop.is_set()
            saves = last or stops or _due(step, config.checkpoint_every)
            if logs or evaluates or saves or accelerator.device.type == "cpu":  # elsewhere looking means waiting
                loss_value, norm_value = run.check_finite(step, loss, norm)
            if logs or evaluates or saves:
                elapsed = time.perf_counter() - clock
                progress = replace(progress, step=step, tokens=tokens, seconds=progress.seconds + elapsed)
                if logs:
                    speed = steps_timed * tokens_per_step / elapsed
                    record(
                        {
                            "kind": "train",
                            "step": step,
                            "tokens": tokens,
                            "loss": loss_value,
                            "lr": learning_rate(step, config.steps, config.optimizer),
                            "grad_norm": norm_value,
                            "tokens_per_second": speed,
                            "seconds": progress.seconds,
                            **run.usage(step, speed),
                        }
                    )
                if evaluates:
                    record({"kind": "eval", "step": step, "loss": run.heldout_loss(step)})
                if saves:
                    run.check_weights(step)
                    if metrics is not None:
                        progress = replace(progress, metrics=metrics.sync())
                    write_checkpoint(run.state, run_dir, progress, config)
                clock, steps_timed = time.perf_counter(), 0
            show(display.step, step)
            if stops and not last:
                raise KeyboardInterrupt(f"stopped after step {step}; train in {run_dir} again to go on")


@contextmanager
def _trackers(config: TrainConfig, accelerator: Accelerator, step: int) -> Iterator[None]:
    if config.tensorboard:
        # Points that a killed run wrote after its last checkpoint are purged, as they are from the metrics.
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
    try:
        yield
    finally:
        # Not accelerator.end_training(): it would end the process group, and another run may follow.
        for tracker in accelerator.trackers:
            tracker.finish()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _build_accelerator(config: TrainConfig) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, GradientAccumulationPlugin, is_tensorboard_available

    if config.tensorboard and not is_tensorboard_available():  # accelerate would go on without a word
        raise ModuleNotFoundError("tensorboard=true: the package tensorboard is not installed", name="tensorboard")
    # accelerate keeps one precision per process; several runs in one process may differ in it.
    AcceleratorState._reset_state()
    # A plugin, because the plain argument gives way to a launcher's environment variable.
    plugin = GradientAccumulationPlugin(num_steps=config.gradient_accumulation, sync_with_dataloader=False)
    accelerator = Accelerator(
        cpu=config.device == "cpu",
        mixed_precision=config.mixed_precision if config.mixed_precision in ("bf16", "fp16") else "no",
        gradient_accumulation_plugin=plugin,
        log_with="tensorboard" if config.tensorboard else None,
        project_dir=config.output_dir,
    )
    if accelerator.distributed_type in (
        DistributedType.FSDP,
        DistributedType.DEEPSPEED,
        DistributedType.MEGATRON_LM,
    ):
        raise ValueError(
            f"{accelerator.distributed_type} is the launcher's: start plain processes, and set sharding=fsdp to shard"
        )
    if config.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("mixed_precision=fp16 needs a GPU, and this run is on a CPU: take bf16 or none")
    return accelerator


def _rows_per_part(config: TrainConfig, processes: int) -> int:
    parts = processes * config.gradient_accumulation
    if config.batch_size % parts:
        raise ValueError(
            f"batch_size={config.batch_size} does not divide evenly among {processes} processes "
            f"times gradient_accumulation={config.gradient_accumulation}"
        )
    return config.batch_size // parts


@contextmanager
def _stop_requests(enabled: bool) -> Iterator[threading.Event]:
    """Note the first SIGINT, SIGTERM or SIGHUP instead of breaking off; the second one breaks off as usual."""
    requested = threading.Event()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def note(number: int, frame: Any) -> None:
        requested.set()
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, note)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
