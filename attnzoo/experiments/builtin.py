"""The built-in configurations, found by name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnzoo.errors import did_you_mean_path

CONFIGS = Path(__file__).parent / "configs"


def built_in(command: str) -> dict[str, Path]:
    """The built-in configurations of ``train`` or ``compare``: name -> file."""
    return {path.stem: path for path in sorted((CONFIGS / command).glob("*.yaml"))}


def find_config(config: str | Path, command: str, also: Sequence[str] = ()) -> Path | Mapping[str, Any]:
    """The configuration that ``config`` names: a file of that path, else a built-in one, else a preset's settings.

    Args:
        config: path or name.
        command: the command that reads it, ``train`` (for which there are presets, :mod:`attnzoo.models.presets`) or
            ``compare``.
        also: names of other things that the caller would have taken, for the error.

    Raises:
        FileNotFoundError: neither exists; the built-in names are listed, and the nearest one is named.
    """
    known = built_in(command)
    if Path(config).is_file():
        return Path(config)
    if str(config) in known:
        return known[str(config)]
    names: tuple[str, ...] = ()
    if command == "train":
        from attnzoo.models import presets

        names = presets.names()
        if str(config) in names:
            return presets.preset(str(config)).train_settings()
    if str(config) and Path(config).is_dir() and command == "train":
        run = Path(config) / "config.yaml"
        goes_on, source = shlex.join(["attnzoo", "train", str(run)]), shlex.quote(f"data.source={config}")
        how = f"`{goes_on}` goes on with this run" if run.is_file() else f"{source} trains on it"
        raise FileNotFoundError(f"{str(config)!r} is a folder: expected a configuration; {how}")
    or_preset = ", or a preset (`attnzoo list --presets`)" if names else ""
    raise FileNotFoundError(
        f"no configuration file {str(config)!r}, and none of that name is built in: expected a path or one of "
        f"{', '.join([*known, *also])}{or_preset}" + did_you_mean_path(config, [*known, *names, *also])
    )
