"""A training run's step: the update, the evaluation, and checks of numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnzoo.data import Data, heldout_windows
from attnzoo.data.tasks import Examples
from attnzoo.data.windows import begins_within, heldout_starts
from attnzoo.training.batches import TokenBatch, moved, rows_of, rows_of_answers
from attnzoo.training.checkpoint import newest_checkpoint
from attnzoo.training.config import TrainConfig
from attnzoo.training.context import Sharing, in_context
from attnzoo.training.forgetting import Extra, extra_loss, networks, set_phase, shown, taught
from attnzoo.training.metrics import Row
from attnzoo.training.optimizer import learning_rate
from attnzoo.training.sharding import TrainState, gathered, own
from attnzoo.training.throughput import Operations, blocks_kept, peak_here


class TooLargeError(RuntimeError):
    """A step does not fit into the GPU's memory."""


class Run:
    """The objects of a training run (model, optimizer, data), with its update, evaluation and checks."""

    def __init__(self, config: TrainConfig, state: TrainState, data: Data, rows_per_part: int, sharing: Sharing):
        self.config, self.state, self.sharing = config, state, sharing
        self.accelerator, self.model, self.optimizer = state.accelerator, state.model, state.optimizer
        self.data, self.rows_per_part = data, rows_per_part
        self.parts: list[TokenBatch] = []  # rows of the last step
        self.networks = networks(self.model)
        self.extra: Extra | None = None  # loss terms of its last part, with One-Pass Forgetting

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Update the weights once; return the mean loss over the whole batch and the gradient's norm before clipping.

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
        for rows, weight, of_pairs in zip(parts, self._weights(parts), self._pair_weights(parts), strict=True):
            with accelerator.accumulate(self.model):
                set_phase(self.networks, config.forgetting, step)
                loss = self._loss(step, rows)
                self.extra = extra_loss(self.networks, config.forgetting, step, of_pairs)
                if weight is not None:
                    loss = loss * weight
                # the layers' loss terms are means over tokens with or without targets: each part has the same weight
                accelerator.backward(loss if self.extra is None else loss + self.extra.loss)
                if accelerator.sync_gradients:
                    norm = gathered(accelerator.clip_grad_norm_(self.model.parameters(), config.optimizer.clip_norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
        return accelerator.reduce(torch.stack(losses).mean(), "mean"), norm

    def _weights(self, parts: list[TokenBatch]) -> list[Tensor | None]:
        """The factor of each part's mean loss with which the mean over parts and processes is the batch's mean loss.

        None where all parts have the same number of targets.
        """
        alike = parts[0].cu_seqlens is None and parts[0].fragments is None
        if alike and not isinstance(self.data.train, Examples):
            return [None] * len(parts)
        return self._shares(torch.tensor([rows.counted for rows in parts]))

    def _pair_weights(self, parts: list[TokenBatch]) -> list[Tensor | None]:
        """The factor ``[layers]`` of each part's distillation losses, which are means over pairs; None for equal
        parts."""
        if not self.networks or parts[0].cu_seqlens is None:
            return [None] * len(parts)
        return self._shares(torch.tensor([[taught(rows, network) for network in self.networks] for rows in parts]))

    def _shares(self, counted: Tensor) -> list[Tensor | None]:
        """The counts ``[parts, ...]`` of this process's parts, each divided by the mean over the parts of all
        processes."""
        accelerator = self.accelerator
        counted = moved(counted, accelerator.device)
        total = accelerator.reduce(counted.sum(0), "sum").clamp(min=1)  # a step of packed documents may have no targets
        return list(counted * (len(counted) * accelerator.num_processes) / total)

    def _loss(self, step: int, rows: TokenBatch) -> Tensor:
        """The mean loss of a batch; diverged weights raise FloatingPointError when a form refuses its gates."""
        packed = {} if rows.cu_seqlens is None else {"cu_seqlens": rows.cu_seqlens}
        try:
            with in_context(rows):
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

    def _part(self, step: int, part: int) -> TokenBatch:
        """This process's rows of a part of a batch; the rows of a batch depend on the step alone."""
        rows, device, windows, sharing = self.rows_per_part, self.accelerator.device, self.data.train, self.sharing
        first = (step - 1) * self.config.batch_size + (part * sharing.groups + sharing.number) * rows
        indices = range(first, first + rows)
        if isinstance(windows, Examples):
            return sharing.share(rows_of_answers(*windows.batch(indices))).to(device)
        begins = None if self.data.heldout_documents is None else [windows.begins(index) for index in indices]
        return sharing.share(rows_of(windows.batch(indices), begins)).to(device)

    @torch.no_grad()
    def heldout_loss(self, step: int) -> float:
        """The mean loss in nats per held-out token, or per answer of a task, over all processes."""
        accelerator = self.accelerator
        count, held = self._heldout()
        # Every process runs equally many equal batches: the model synchronises them.
        together = self.rows_per_part * self.sharing.groups
        total = torch.zeros(2, dtype=torch.float64)  # [sum of losses, tokens]
        self.model.eval()
        for first in range(0, count, together):
            mine = first + self.sharing.number * self.rows_per_part + np.arange(self.rows_per_part)
            which = np.where(mine < count, mine, 0)  # rows that fill the last batch do not count
            rows = self.sharing.share(held(which, int((mine < count).sum())))
            loss = self._loss(step, rows.to(accelerator.device))
            if rows.counted:
                total += torch.tensor([float(loss) * rows.counted, rows.counted], dtype=torch.float64)
        # float32 could not hold a sum over many tokens
        summed = accelerator.gather(total.to(accelerator.device)[None]).sum(0)
        if not summed[1]:
            raise ValueError(
                f"the held-out split of {self.config.data.title!r}: expected documents of two tokens or more in the "
                f"first eval_tokens={self.config.eval_tokens}, got none, so that nothing is asked"
            )
        mean = float(summed[0] / summed[1])
        if not math.isfinite(mean):
            raise self._diverged(step, f"the held-out loss is {mean}")
        return mean

    def _heldout(self) -> tuple[int, Callable[[npt.NDArray[np.int64], int], TokenBatch]]:
        """The number of held-out rows of an evaluation, and a function from row numbers and a count to a batch."""
        length, tokens = self.config.data.context_length, self.config.eval_tokens
        heldout, documents = self.data.heldout, self.data.heldout_documents
        if isinstance(heldout, Examples):
            return max(1, tokens // length), lambda which, given: rows_of_answers(*heldout.batch(which.tolist()), given)
        windows = heldout_windows(heldout, length, tokens)
        starts = heldout_starts(len(heldout), length, tokens)

        def held(which: npt.NDArray[np.int64], given: int) -> TokenBatch:
            begins = None if documents is None else [begins_within(documents, int(starts[i]), length) for i in which]
            return rows_of(windows[which], begins, given)

        return len(windows), held

    @functools.cached_property
    def peak(self) -> float | None:
        """The peak operations per second of the GPUs, or None; an unknown GPU is logged once."""
        return peak_here(self.accelerator.device, self.accelerator.num_processes)

    def usage(self, step: int, tokens_per_second: float) -> Row:
        """The share of blocks that pruning keeps, where a layer prunes, and MFU, where the GPU's peak is known."""
        self.model.eval()
        try:
            kept = {} if self.parts[0].fragments is not None else blocks_kept(self.model, self.parts[0])
        except ValueError as error:
            raise self._diverged(step, str(error)) from error
        row: Row = {}
        if kept:
            shares = torch.tensor(list(kept.values()), device=self.accelerator.device)
            kept = dict(zip(kept, self.accelerator.reduce(shares, "mean").tolist(), strict=True))
            row["blocks_kept"] = sum(kept.values()) / len(kept)
        if self.peak is not None:
            share = tokens_per_second / sum(int(part.lengths.sum()) for part in self.parts) / self.peak
            operations = Operations(self.accelerator.unwrap_model(self.model))
            row["mfu"] = operations.per_step(self.parts, kept) * share
            row["mfu_dense"] = operations.per_step(self.parts) * share
        return row

    def forgets(self) -> Row:
        """The metrics of One-Pass Forgetting from the last step's last part in this process; empty without such
        layers."""
        return {} if self.extra is None else shown(self.extra.row)

    def check_finite(self, step: int, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """The loss and the norm as numbers, after a check that they are finite.

        Raises:
            FloatingPointError: one of them is not finite, unless loss scaling skips the update.
        """
        skipped = self.accelerator.scaler is not None  # the fused optimizer skips without telling accelerate
        for name, value in (("loss", float(loss)), ("norm of the gradient", float(norm))):
            if not math.isfinite(value) and not (name != "loss" and skipped):
                raise self._diverged(step, f"the {name} is {value}")
        return float(loss), float(norm) if math.isfinite(float(norm)) else 0.0

    def check_weights(self, step: int) -> None:
        """Raise where weights are not finite, before they are saved.

        Raises:
            FloatingPointError: one of them is not finite.
        """
        finite = [own(parameter.detach()).isfinite().all() for parameter in self.model.parameters()]
        if self.accelerator.reduce((~torch.stack(finite)).sum()):  # over all processes
            raise self._diverged(step, "a weight is not finite after the update")
