"""The configurations that come along, found by name."""

from __future__ import annotations

from pathlib import Path

from attnzoo.errors import nearest

CONFIGS = Path(__file__).parent / "configs"


def built_in(command: str) -> dict[str, Path]:
    """The built-in configurations of ``train`` or ``compare``: name -> file."""
    return {path.stem: path for path in sorted((CONFIGS / command).glob("*.yaml"))}


def find_config(config: str | Path, command: str) -> Path:
    """The file that ``config`` means: a file of that path, else the built-in one of that name.

    Args:
        config: path or name.
        command: whose configuration is wanted, ``train`` or ``compare``.

    Raises:
        FileNotFoundError: neither exists; the built-in names are listed, and the nearest one is named.
    """
    known = built_in(command)
    if Path(config).is_file():
        return Path(config)
    if str(config) in known:
        return known[str(config)]
    close = nearest(Path(config).stem, known)
    raise FileNotFoundError(
        f"no configuration file {str(config)!r}, and none of that name is built in: expected a path or one of "
        f"{', '.join(known)}" + (f"; did you mean {close!r}?" if close else "")
    )
