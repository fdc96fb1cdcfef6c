"""Models that several processes share out among them (FSDP2), and checkpoints that each writes its part of.

A sharded checkpoint holds two folders of `torch.distributed.checkpoint` instead of `model.safetensors` and
`optimizer.bin`: `model/` and `optimizer/`. Any number of processes reads it, one as well as many.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import OPTIMIZER, OPTIMIZER_PARTS, PARTS, WEIGHTS
from attnzoo.training.optimizer import build_optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

    from attnzoo.models import LanguageModel


def prepare(model: LanguageModel, accelerator: Accelerator, config: TrainConfig) -> TrainState:
    """Bring a model to the accelerator's device, in the way that `config.sharding` says, with its optimizer."""
    if config.sharding == "none":
        replica, optimizer = accelerator.prepare(model, build_optimizer(model, config.optimizer))
        return TrainState(accelerator, replica, optimizer, sharded=False)
    prepared = _shard(model, accelerator)
    parts = build_optimizer(prepared, config.optimizer)
    return TrainState(accelerator, prepared, accelerator.prepare_optimizer(parts), sharded=True)


def _shard(model: LanguageModel, accelerator: Accelerator) -> nn.Module:
    """Cut each block's parameters, and those outside of the blocks, into one part per process, in place.

    Parameters are gathered in float32, a block at a time, and autocast rounds what it multiplies: gates, norms and
    every other number are those of a model that is not sharded. Nothing is cut where there is one process.
    """
    # accelerate's own FSDP2 leaves a model on CPUs whole without a word, and casts gates with their block's matrices.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if accelerator.num_processes > 1:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model.to(accelerator.device)
    prepared: nn.Module = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast
    return prepared


def gathered(x: Tensor) -> Tensor:
    """The tensor of which each process has a part; called by all of them."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def own(x: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return x.to_local() if hasattr(x, "to_local") else x


@dataclass(frozen=True)
class TrainState:
    """A model and its optimizer as a run trains them; each method is called by all processes.

    Args:
        accelerator: that has prepared them.
        model: sharded, replicated or alone.
        optimizer: accelerate's, around torch's.
        sharded: whether each process saves a part of its own.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    sharded: bool

    def save(self, folder: Path) -> None:
        """Write the files that the next step depends on.

        Raises:
            Exception: a process could not; of which kind depends on who was writing.
        """
        if not self.sharded:
            logging.getLogger("accelerate.utils.other").addFilter(_is_news)
            self.accelerator.save_state(str(folder))
            return
        from torch.distributed.checkpoint.state_dict_saver import save

        model, optimizer = self._states()
        for name, state in ((PARTS, model), (OPTIMIZER_PARTS, optimizer)):
            with _one_error():
                save(state, checkpoint_id=folder / name, no_dist=_alone())

    def load(self, checkpoint: Path) -> None:
        """Load what was saved, by however many processes, sharded or not.

        Raises:
            Exception: a file of it cannot be read, or does not fit.
        """
        has_all = (checkpoint / WEIGHTS).is_file()
        if has_all and not self.sharded:
            self.accelerator.load_state(str(checkpoint))
            _check_shapes(self.optimizer.optimizer)
            self.accelerator.step = 0  # parts counted since an update: there may be another number of them now
            return
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )
        from torch.distributed.checkpoint.state_dict_loader import load

        if has_all:
            model, optimizer = self._whole_states(checkpoint)
        else:
            model, optimizer = self._states()
            for name, state in ((PARTS, model), (OPTIMIZER_PARTS, optimizer)):
                with _one_error():
                    load(state, checkpoint_id=checkpoint / name, no_dist=_alone())
        options = StateDictOptions(full_state_dict=has_all)
        set_model_state_dict(self.model, model, options=options)
        before = [dict(group) for group in self.optimizer.param_groups]
        set_optimizer_state_dict(self.model, self.optimizer.optimizer, optimizer, options=options)
        for group, settings in zip(self.optimizer.param_groups, before, strict=True):
            for name, value in settings.items():  # torch forgets those of a group without parameters
                group.setdefault(name, value)

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        return get_model_state_dict(self.model), dict(get_optimizer_state_dict(self.model, self.optimizer.optimizer))

    def _whole_states(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two states of files that hold all of them; the optimizer's numbers become names."""
        from safetensors.torch import load_file

        model, optimizer = load_file(checkpoint / WEIGHTS), torch.load(checkpoint / OPTIMIZER, weights_only=True)
        if (tied := "head.weight") not in model:  # safetensors holds a tied weight once
            model[tied] = model["embedding.weight"]
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        named = {
            number: names[id(parameter)]
            for ours, theirs in zip(self.optimizer.param_groups, optimizer["param_groups"], strict=True)
            for parameter, number in zip(ours["params"], theirs["params"], strict=True)
        }
        state = {named[number]: values for number, values in optimizer["state"].items()}
        groups = [{**g, "params": [named[number] for number in g["params"]]} for g in optimizer["param_groups"]]
        return model, {"state": state, "param_groups": groups}


def _check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise for a state of another model, whose tensors torch's fused kernels read beyond their ends."""
    for parameter, state in optimizer.state.items():
        for name, x in state.items():
            if isinstance(x, Tensor) and x.dim() and x.shape != parameter.shape:
                raise ValueError(f"{OPTIMIZER}: {name}: expected {list(parameter.shape)}, got {list(x.shape)}")


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, sharded or not, by name, in newly allocated memory.

    Raises:
        Exception: they cannot be read.
    """
    from safetensors.torch import load_file

    if (checkpoint / PARTS).is_dir():
        return join_parts(checkpoint / PARTS)
    return {name: tensor.clone() for name, tensor in load_file(checkpoint / WEIGHTS).items()}


def join_parts(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of a folder of `torch.distributed.checkpoint`, joined in this process.

    Raises:
        RuntimeError, OSError: it cannot be read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    with _one_error():
        reader = FileSystemReader(folder)
        found = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(x.size, dtype=x.properties.dtype)
            for name, x in found.items()
            if isinstance(x, TensorStorageMetadata)
        }
        load(state, storage_reader=reader, no_dist=True)
    return state


def _is_news(record: logging.LogRecord) -> bool:
    """A log filter that drops accelerate's warning at each checkpoint that a tied weight is written once."""
    return "Removed shared tensor" not in record.getMessage()


def _alone() -> bool:
    return not torch.distributed.is_initialized()


@contextmanager
def _one_error() -> Iterator[None]:
    """Raise the first process's error as an Exception, instead of torch's BaseException with tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # expected, as this is one process
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"process {rank}: {first}") from error
