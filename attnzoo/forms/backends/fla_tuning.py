"""How flash-linear-attention tunes its kernels: said before, among few tiles, by one process for all, kept on disk.

Left alone it measures up to 48 tiles of each of a dozen kernels for each new shape, which takes minutes, in every
process that starts before the first has ended.
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

logger = logging.getLogger("attnzoo.fla")

# What is measured, by kernel: the tiles that have these numbers, where any has. One entry: nothing is measured.
USUAL: Mapping[str, tuple[int, ...]] = {"num_stages": (3,), "num_warps": (4, 2)}
WALL = {"num_stages": (2,), "num_warps": (4,), "BT": (64,), "BS": (64,)}  # each of its 24 tiles compiles for long
TILES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "chunk_local_cumsum_scalar_kernel": {"num_warps": (4,)},
    "chunk_local_cumsum_vector_kernel": {"num_warps": (4,), "BS": (32,)},
    "chunk_fwd_kernel_h": {"num_stages": (3,), "num_warps": (4,)},
    "chunk_bwd_kernel_dh": {"num_stages": (3,), "num_warps": (4,)},
    "chunk_fwd_kernel_o": {"num_warps": (4, 8)},
    "chunk_gla_fwd_kernel_o": {"num_stages": (3,), "num_warps": (4,)},
    "chunk_scaled_dot_kkt_fwd_kernel": {"num_stages": (3,), "num_warps": (4,)},
    "parallel_wall_attn_fwd_kernel": WALL,
    "parallel_wall_attn_bwd_kernel_dq": WALL,
    "parallel_wall_attn_bwd_kernel_dkv": WALL,
}
WARMUP, REPEAT = 5, 20  # milliseconds of each measurement

_shortened: set[int] = set()
_coming = ""  # what is about to run, in words
_said: set[str] = set()


def will_run(shape: str) -> None:
    """``shape`` is what a tuning that begins now is for."""
    global _coming
    _coming = shape


def all_tiles() -> bool:
    """Whether the tuning is left as it is, which ``ATTNZOO_FLA_TUNING=full`` asks for.

    Raises:
        ValueError: another value.
    """
    setting = os.environ.get("ATTNZOO_FLA_TUNING", "")
    if setting not in ("", "0", "full"):
        raise ValueError(f"ATTNZOO_FLA_TUNING: expected full (all tiles) or unset (a few), got {setting!r}")
    return setting == "full"


def shorten() -> None:
    """Take over the tuning of those kernels of flash-linear-attention that are loaded, unless :func:`all_tiles`."""
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
            tuner.check_disk_cache = functools.partial(_alone, name, tuner.check_disk_cache)


def tuners() -> Iterator[tuple[str, Any]]:
    """Triton's tuners in the modules of flash-linear-attention that are loaded, by the names of their kernels."""
    from triton.runtime.autotuner import Autotuner

    for module in [m for name, m in sys.modules.items() if name.startswith("fla.ops")]:
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None:
                yield kernel.base_fn.__name__, kernel


def _keeps() -> bool:
    """Whether Triton can keep what it measured: 3.4 and later can."""
    from triton.runtime.autotuner import Autotuner

    return hasattr(Autotuner, "check_disk_cache")


def few(configs: Sequence[Any], wanted: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Those of Triton's ``configs`` with the ``wanted`` numbers; a wish that none fulfils counts for nothing."""
    left = list(configs)
    for name, values in wanted.items():
        left = [c for c in left if {**c.kwargs, **vars(c)}.get(name) in values] or left
    return left


def _run(name: str, tuner: Any, everything: list[Any], run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Launch with the best of the few tiles; of all of them, where none of the few fits the shared memory."""
    from triton.runtime.errors import OutOfResources

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
    """Where Triton keeps what it compiles and measures."""
    return Path(
        os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton/cache"
    )


def _alone(name: str, look_up: Callable[..., Any], *args: Any) -> Any:
    """Look up or measure while no other process measures the same kernel: those that wait then find its result."""
    with _lock(_folder() / f"attnzoo-{name}.lock"):
        return look_up(*args)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time where the file system can; else by all."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
