"""The training loop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from attnzoo.data import Data, build_data
from attnzoo.data.sources import is_text
from attnzoo.files import check_folder
from attnzoo.training.checkpoint import (
    Progress,
    load_state,
    newest_checkpoint,
    read_progress,
    remove_stale,
    set_aside_after,
    write_checkpoint,
)
from attnzoo.training.config import TrainConfig
from attnzoo.training.context import Sharing
from attnzoo.training.digests import digest_of_own
from attnzoo.training.folder import (
    check_config_file,
    check_resumable,
    check_same_teacher,
    exclusive,
    is_other,
    make_folder,
    write_config,
)
from attnzoo.training.forgetting import check_schedule
from attnzoo.training.launch import waiting_for_others
from attnzoo.training.metrics import Metrics, Row, rows_until, set_rows_aside
from attnzoo.training.model import new_model
from attnzoo.training.optimizer import learning_rate
from attnzoo.training.progress import Quiet, build_display
from attnzoo.training.sharding import prepare
from attnzoo.training.start import keep_tokenizer, start_from, weights_for
from attnzoo.training.steps import Run
from attnzoo.training.teacher import check_teacher, fingerprint, learn_from, load_teacher

if TYPE_CHECKING:
    from accelerate import Accelerator

    from attnzoo.data.config import DataConfig
    from attnzoo.models import LanguageModel

logger = logging.getLogger(__name__)
# files that a run writes
OWN = ("config.yaml", "metrics.jsonl", "checkpoints/step-00000001/model.safetensors", "progress.json")
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train(config: TrainConfig, on_row: Callable[[Row], None] | None = None) -> Path:
    """Train a model, or continue its training, and return the run folder (`config.output_dir`).

    A folder that holds checkpoints of the same configuration is continued from the newest one, to the same losses
    that an uninterrupted run has (bit for bit on a CPU with equally many threads); one that is finished is left as
    it is. Under `accelerate launch` this runs in every process, the model being replicated.

    The first SIGINT, SIGTERM or SIGHUP in a single process ends the step under way, writes a checkpoint and then raises
    KeyboardInterrupt; a closed pipe of the progress does the same. An ignored signal stays ignored.

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
    _check_place(run_dir, config.data)
    accelerator = _build_accelerator(config)
    from accelerate.utils import set_seed

    rows_per_part = config.rows_per_part(accelerator.num_processes)
    data = build_data(config.data)
    set_seed(config.seed)
    model: Any = _checked_model(config, data)
    model.recompute = config.recompute

    make_folder(run_dir)
    main = accelerator.is_main_process
    with exclusive(run_dir) if main else nullcontext():
        checkpoint = check_resumable(run_dir, config, data) if main else None
        if checkpoint is not None:
            set_aside_after(checkpoint)
        elif main:
            _say_idle(model, data.vocab_size)
        accelerator.wait_for_everyone()
        if not main:  # the first process has moved damaged checkpoints out of the way
            checkpoint = newest_checkpoint(run_dir)
        if checkpoint is None and config.start_from is not None:
            start_from(model, config.start_from, config.data)
        teacher = load_teacher(config)
        if teacher is not None:
            learn_from(teacher.to(accelerator.device), model, config.objective)
        if config.compile:
            torch.compiler.reset()  # compilations of an earlier run in this process count towards a limit
            for block in model.blocks:
                block.compile()
            model.chunk_loss = torch.compile(model.chunk_loss)
        sharing = Sharing.of(config, accelerator, model)
        state = prepare(model, accelerator, config)
        own = digest_of_own(config.model.attention)
        progress = Progress(data_fingerprint=data.fingerprint, teacher=fingerprint(teacher), own=own)
        if checkpoint is not None:
            before = read_progress(checkpoint)
            check_same_teacher(run_dir, config, before.teacher, progress.teacher)
            progress = replace(before, data_fingerprint=data.fingerprint)
            load_state(state, checkpoint)
        accelerator.wait_for_everyone()
        if main:
            if checkpoint is None and is_other(run_dir, config):
                set_rows_aside(run_dir)
            write_config(run_dir, config)
            keep_tokenizer(config.data, run_dir, anew=checkpoint is None)
            remove_stale(run_dir / "checkpoints", config.keep_checkpoints)
        if progress.step < config.steps:
            run = Run(config, state, data, rows_per_part, sharing)
            _train_from(progress, run, run_dir, on_row)
        elif main:
            rows_until(run_dir, progress.step, progress.metrics)  # logs whether they are as they were written
        accelerator.wait_for_everyone()
    accelerator.free_memory()
    return run_dir


def check_run(config: TrainConfig, data: Data) -> None:
    """Raise the errors that :func:`train` would raise before its first step; nothing is written.

    Args:
        config: the run's configuration.
        data: the run's data.

    Raises:
        ValueError, OSError, CheckpointError: as :func:`train` does.
    """
    run_dir = Path(config.output_dir)
    _check_place(run_dir, config.data)
    model = _checked_model(config, data)
    if check_resumable(run_dir, config, data) is None and config.start_from is not None:
        weights_for(model, config.start_from, config.data)
    load_teacher(config)


def _check_place(run_dir: Path, data: DataConfig) -> None:
    """Raise where the run folder cannot be written to, or lies among the texts that the run reads."""
    check_folder(run_dir)
    check_config_file(run_dir)
    if not any(PurePath(name).match(data.pattern) for name in OWN):
        return
    for source in filter(None, [*(entry.source for entry in data.weighted), data.heldout_source]):
        folder = Path(source)
        if folder.is_dir() and is_text(source, data.pattern) and folder.resolve() == run_dir.resolve():
            raise ValueError(
                f"output_dir={str(run_dir)!r}: expected another folder than that of the data, {source!r}, of whose "
                "texts the run's files would be; a folder inside it is left out of them"
            )


def _checked_model(config: TrainConfig, data: Data) -> LanguageModel:
    if data.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is below the {data.vocab_size} tokens of {config.data.title!r}"
        )
    model = new_model(config)
    check_schedule(model, config)
    check_teacher(model, config)
    return model


def _say_idle(model: LanguageModel, tokens: int) -> None:
    """Log where more than a tenth of a large model's parameters are embeddings of tokens that the data does not
    have."""
    sizes = model.config
    idle = (sizes.vocab_size - tokens) * sizes.hidden_size * (1 if sizes.tie_embeddings else 2)
    if idle > max(2**20, sum(parameter.numel() for parameter in model.parameters()) // 10):
        text = "model.vocab_size=%d, of which the data has %d: %d million parameters stay idle"
        logger.warning(text, sizes.vocab_size, tokens, idle // 10**6)


def _train_from(progress: Progress, run: Run, run_dir: Path, on_row: Callable[[Row], None] | None) -> None:
    config, accelerator = run.config, run.accelerator
    main = accelerator.is_main_process
    tokens_per_step = config.batch_size * config.data.context_length

    with (
        Metrics(run_dir, progress.step, progress.metrics) if main else nullcontext() as metrics,
        build_display(config, progress.step) if main else Quiet() as display,
        _stop_requests(accelerator.num_processes == 1) as stop,
        _trackers(config, accelerator, progress.step) as log,
    ):

        def show(update: Callable[[Any], None], what: Any) -> None:
            try:
                update(what)
            except OSError:  # the pipe's reader has closed; of several processes one cannot stop alone
                if accelerator.num_processes == 1:
                    stop.set()

        def record(row: Row) -> None:
            if metrics is not None:
                metrics.append(row)
                show(display.row, row)
                if on_row is not None:
                    on_row(row)
            log(row)

        clock, steps_timed, seconds_timed = time.perf_counter(), 0, 0.0  # since the last row of training
        for step in range(progress.step + 1, config.steps + 1):
            last = step == config.steps
            loss, norm = run.step(step)
            steps_timed += 1
            tokens = step * tokens_per_step
            logs = last or step % config.log_every == 0
            evaluates = last or _due(step, config.eval_every)
            stops = stop.is_set()
            saves = last or stops or _due(step, config.checkpoint_every)
            if logs or evaluates or saves or accelerator.device.type == "cpu":  # on a GPU reading the loss waits
                loss_value, norm_value = run.check_finite(step, loss, norm)
            if logs or evaluates or saves:
                elapsed = time.perf_counter() - clock
                progress = replace(progress, step=step, tokens=tokens, seconds=progress.seconds + elapsed)
                seconds_timed += elapsed
                if logs:
                    # 0 where no time has passed by the clock
                    speed = steps_timed * tokens_per_step / seconds_timed if seconds_timed > 0 else 0.0
                    steps_timed, seconds_timed = 0, 0.0
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
                            **run.forgets(),
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
                clock = time.perf_counter()
            show(display.step, step)
            if stops and not last:
                raise KeyboardInterrupt(f"stopped after step {step}; train in {run_dir} again to go on")
        if stop.is_set():  # in the last step, its evaluation or its checkpoint
            raise KeyboardInterrupt(f"stopped after step {config.steps}, the last: the run in {run_dir} is finished")


@contextmanager
def _trackers(config: TrainConfig, accelerator: Accelerator, step: int) -> Iterator[Callable[[Row], None]]:
    """A function that logs a row to TensorBoard, or one that does nothing where `tensorboard` is off."""

    def log(row: Row) -> None:
        numbers = {f"{row['kind']}/{key}": row[key] for key in row if key not in ("kind", "step")}
        accelerator.log(numbers, step=row["step"])

    if not config.tensorboard:
        yield lambda row: None
        return
    before = threading.excepthook

    def unless_said_here(failed: threading.ExceptHookArgs) -> None:
        """Silence errors of TensorBoard's writing thread, as on a full disk: the next write raises them."""
        if not (isinstance(failed.exc_value, OSError) and "tensorboard" in type(failed.thread).__module__):
            before(failed)

    def begin(step: int) -> None:
        # Points that a killed run wrote after its last checkpoint are purged, as they are from the metrics.
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})

    threading.excepthook = unless_said_here
    try:
        _naming(begin, config)(step)
        try:
            yield _naming(log, config)
        except BaseException:
            with suppress(OSError):  # the first error counts
                _finish(accelerator)
            raise
        _naming(_finish, config)(accelerator)
    finally:
        threading.excepthook = before


def _finish(accelerator: Accelerator) -> None:
    for tracker in accelerator.trackers:  # not accelerator.end_training(): it would end the process group
        tracker.finish()


def _naming(write: Callable[[Any], None], config: TrainConfig) -> Callable[[Any], None]:
    """``write`` with errors that name the TensorBoard folder."""

    def named(what: Any) -> None:
        try:
            write(what)
        except OSError as error:
            why = f"could not write for tensorboard=true: {error.strerror}"
            raise OSError(error.errno, why, str(Path(config.output_dir) / "tensorboard")) from error

    return named


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _build_accelerator(config: TrainConfig) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import (
        DistributedType,
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        is_tensorboard_available,
    )

    if config.tensorboard and not is_tensorboard_available():  # accelerate would silently go on without it
        raise ModuleNotFoundError("tensorboard=true: the package tensorboard is not installed", name="tensorboard")
    # accelerate keeps one precision per process; several runs in one process may differ in it.
    AcceleratorState._reset_state()
    # A plugin, because the plain argument gives way to a launcher's environment variable.
    plugin = GradientAccumulationPlugin(num_steps=config.gradient_accumulation, sync_with_dataloader=False)
    limit = timedelta(seconds=config.exchange_timeout)
    with waiting_for_others(limit):
        accelerator = Accelerator(
            # else accelerate would not connect its processes
            cpu=config.device == "cpu" or not torch.accelerator.is_available(),
            mixed_precision=config.mixed_precision if config.mixed_precision in ("bf16", "fp16") else "no",
            gradient_accumulation_plugin=plugin,
            log_with="tensorboard" if config.tensorboard else None,
            project_dir=config.output_dir,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)],
        )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"{accelerator.distributed_type} is the launcher's: start plain processes, and set sharding=fsdp to shard"
        )
    if config.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("mixed_precision=fp16 needs a GPU, and this run is on a CPU: take bf16 or none")
    return accelerator


@contextmanager
def _stop_requests(enabled: bool) -> Iterator[threading.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets instead of ending the process; a second one ends it."""
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
