"""Shorter tuning of flash-linear-attention's kernels: among few tiles, which are compiled at the same time, logged, by
one process for all, cached on disk.

Unchanged, the library measures up to 48 tiles for each of a dozen kernels and each new shape. That takes minutes, in
every process that starts before the first has finished.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnzoo.kernels.common.recording import recorders
from attnzoo.kernels.common.together import can_compile_together, compiled_together

logger = logging.getLogger("attnzoo.fla")

# Tiles to measure, by kernel: those with these numbers, if any. A single tile needs no measurement. Those of kernels
# that are not USUAL were the fastest of the usual ones for 24 heads of 64 channels, 4 x 4096 tokens, on an H200.
USUAL: Mapping[str, tuple[int, ...]] = {"num_stages": (3,), "num_warps": (4, 2)}
FOUR: Mapping[str, tuple[int, ...]] = {"num_stages": (3,), "num_warps": (4,)}
TWO: Mapping[str, tuple[int, ...]] = {"num_stages": (3,), "num_warps": (2,)}
SQUARE = {**FOUR, "BK": (64,), "BV": (64,)}
WALL = {"num_stages": (2,), "num_warps": (4,), "BT": (64,), "BS": (64,)}  # its 24 tiles compile slowly
TILES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "chunk_local_cumsum_scalar_kernel": {"num_warps": (4,)},
    "chunk_local_cumsum_vector_kernel": {"num_warps": (4,), "BS": (32,)},
    "chunk_fwd_kernel_h": SQUARE,
    "chunk_bwd_kernel_dh": {**FOUR, "BK": (32,), "BV": (32,)},
    "chunk_fwd_kernel_o": {"num_warps": (4, 8)},
    "chunk_bwd_kernel_dqkwg": FOUR,
    "chunk_bwd_kernel_dv": FOUR,
    "chunk_bwd_kernel_dv_local": FOUR,
    "chunk_scaled_dot_kkt_fwd_kernel": {**FOUR, "BK": (64,)},
    "merge_16x16_to_64x64_inverse_kernel": TWO,
    "recompute_w_u_fwd_kernel": FOUR,
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {**TWO, "BK": (64,)},
    "prepare_wy_repr_bwd_kernel": FOUR,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {**FOUR, "BV": (32,)},
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {**FOUR, "BV": (32,)},
    "chunk_gla_fwd_A_kernel_intra_sub_inter": {**TWO, "BK": (64,)},
    "chunk_gla_fwd_A_kernel_intra_sub_intra": TWO,
    "chunk_gla_fwd_kernel_o": SQUARE,
    "chunk_gla_bwd_kernel_intra": TWO,
    "chunk_gla_bwd_kernel_dA": TWO,
    "chunk_gla_bwd_kernel_dv": {**FOUR, "BK": (32,), "BV": (64,)},
    "chunk_gla_bwd_kernel_inter": {**TWO, "BK": (32,), "BV": (64,)},
    "chunk_kda_fwd_kernel_intra_token_parallel": {**TWO, "BH": (8,)},
    "chunk_kda_fwd_kernel_inter_solve_fused": {**TWO, "BK": (64,)},
    "chunk_kda_bwd_kernel_intra": {"num_stages": (2,), "num_warps": (2,)},
    "chunk_kda_bwd_kernel_dAv": FOUR,
    "chunk_kda_bwd_kernel_wy_dqkg_fused": SQUARE,
    "recompute_w_u_fwd_kda_kernel": FOUR,
    "parallel_wall_attn_fwd_kernel": WALL,
    "parallel_wall_attn_bwd_kernel_dq": WALL,
    "parallel_wall_attn_bwd_kernel_dkv": WALL,
}
WARMUP, REPEAT = 5, 20  # milliseconds of each measurement

_shortened: set[int] = set()
_coming = ""  # description of the next call, for the log
_said: set[str] = set()


def will_run(shape: str) -> None:
    """Set ``shape`` as the description of the next call, for the log of a tuning."""
    global _coming
    _coming = shape


def all_tiles() -> bool:
    """Whether ``ATTNZOO_FLA_TUNING=full`` asks for the library's own tuning.

    Raises:
        ValueError: another value.
    """
    setting = os.environ.get("ATTNZOO_FLA_TUNING", "")
    if setting not in ("", "0", "full"):
        raise ValueError(f"ATTNZOO_FLA_TUNING: expected full (all tiles) or unset (a few), got {setting!r}")
    return setting == "full"


def shorten() -> None:
    """Replace the tuning of the loaded kernels of flash-linear-attention, unless :func:`all_tiles`."""
    if all_tiles():
        return
    for name, tuner in tuners():
        if id(tuner) in _shortened:
            continue
        _shortened.add(id(tuner))
        tuner.run = functools.partial(_run, name, tuner, tuner.configs, tuner.run)
        tuner.configs = few(tuner.configs, TILES.get(name, USUAL))
        tuner.do_bench = _measure
        if _keeps():
            tuner.cache_results = True
            tuner.check_disk_cache = functools.partial(
                _alone, name, functools.partial(_looked_up, tuner, tuner.check_disk_cache)
            )  # fmt: skip


def tuners() -> Iterator[tuple[str, Any]]:
    """The names and Triton autotuners of the kernels in loaded modules of flash-linear-attention."""
    from triton.runtime.autotuner import Autotuner

    for module in [m for name, m in sys.modules.items() if name.startswith("fla.ops")]:
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None:
                yield kernel.base_fn.__name__, kernel


def _keeps() -> bool:
    """Whether Triton can cache its measurements on disk: from 3.4 on."""
    from triton.runtime.autotuner import Autotuner

    return hasattr(Autotuner, "check_disk_cache")


def few(configs: Sequence[Any], wanted: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """The ``configs`` with the ``wanted`` numbers; a number that no config has is ignored."""
    left = list(configs)
    for name, values in wanted.items():
        left = [c for c in left if {**c.kwargs, **vars(c)}.get(name) in values] or left
    return left


def _run(name: str, tuner: Any, everything: list[Any], run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Launch a kernel with the best of few tiles, or of all where none of the few fits the shared memory."""
    from triton.runtime.errors import OutOfResources

    tuner.given = args, options
    if recorders.compiles:
        for config in tuner.configs:
            tuner.fn.run(*args, **{**options, **config.all_kwargs()})
        return None
    try:
        return run(*args, **options)
    except OutOfResources as error:
        if len(tuner.configs) == len(everything):
            raise
        logger.warning(
            "flash-linear-attention's %s: all its tiles are measured, as none of a few fits (%s)", name, error
        )
        tuner.configs = everything
        tuner.cache.clear()
        return run(*args, **options)
    finally:
        tuner.given = None  # tensors, which would live on


def _measure(call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
    from triton.testing import do_bench

    if _coming not in _said:
        _said.add(_coming)
        kept = f"once (kept in {_folder()})" if _keeps() else "in every process (Triton 3.4 and later keep it)"
        logger.warning(
            "flash-linear-attention measures tiles of its kernels for %s: seconds to a minute, %s", _coming, kept
        )
    return do_bench(call, warmup=WARMUP, rep=REPEAT, quantiles=quantiles)


def _folder() -> Path:
    """Triton's cache folder."""
    return Path(
        os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton/cache"
    )


def _alone(name: str, look_up: Callable[..., Any], *args: Any) -> Any:
    """Run ``look_up`` while no other process tunes the same kernel; processes that waited find its result.

    What the GPU was given ends before: a collective in it may wait for a process that will wait for the lock.
    """
    connected = torch.distributed.is_available() and torch.distributed.is_initialized()
    if connected and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    with _lock(_folder() / f"attnzoo-{name}.lock"):
        return look_up(*args)


def _looked_up(
    tuner: Any, look_up: Callable[..., Any], key: Any, configs: Sequence[Any], measure: Callable[[], None]
) -> Any:
    """The tuner's own ``look_up``; where nothing is found, all tiles are compiled before they are measured."""

    def compiled_first() -> None:
        _compile(tuner, configs)
        measure()

    return look_up(key, configs, compiled_first)


def _compile(tuner: Any, configs: Sequence[Any]) -> None:
    """Compile a kernel with all tiles at the same time, where Triton can: it takes longer than to measure them."""
    if len(configs) < 2 or not can_compile_together():
        return
    args, options = tuner.given
    try:
        with compiled_together() as met:
            kernel = tuner.fn
            while not hasattr(kernel, "device_caches"):
                kernel = kernel.fn
            met.append(kernel)
            for config in configs:
                tuner.fn.run(*args, **{**options, **config.all_kwargs(), "warmup": True})
    except Exception as error:  # the measurement does without
        logger.debug("tiles are compiled one after the other: %r", error)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """A lock held by one process at a time, or by all where the file system has no locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
