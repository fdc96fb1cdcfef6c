"""The small trained models of the package, by name, and hints about paths that hold no model."""

from __future__ import annotations

from pathlib import Path

from attnzoo.errors import did_you_mean_path

SMALL = Path(__file__).parents[1] / "trained" / "small"  # where `make small` puts runs, each a folder of its name


def small_models() -> list[str]:
    """The names of the small trained models, which `make small` makes."""
    return sorted(path.name for path in SMALL.glob("*/"))


def model_folder(source: str | Path) -> Path:
    """The folder that a path names, or where nothing of that path exists, the small model of that name."""
    known = not Path(source).exists() and str(source) in small_models()
    return SMALL / source if known else Path(source)


def what_is_there(source: Path) -> str:
    """A hint, for an error, about a path that is neither a run nor a model folder."""
    if not source.exists():
        return ", which does not exist" + did_you_mean_path(source, small_models(), folders=True)
    if not source.is_dir():
        return ", which is a file"
    inside = {file.parent for name in ("config.yaml", "config.json") for file in source.glob(f"*/{name}")}
    perhaps = " or ".join(repr(str(folder)) for folder in sorted(inside)[:3])
    return ", which has neither config.yaml nor config.json" + (f" (perhaps {perhaps}?)" if inside else "")
