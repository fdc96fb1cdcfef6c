"""The model to evaluate, and the files of a result."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from attnzoo.experiments.builtin import find_config
from attnzoo.experiments.figures import written
from attnzoo.experiments.report.results import describe_machine
from attnzoo.files import parse_json, write_whole
from attnzoo.trained.model import TrainedModel, fresh_model, load_trained
from attnzoo.training.recipe import load_config
from attnzoo.training.small import small_models

FOLDER = "evaluations"  # folder of results in a run's folder


def find_model(what: str, device: str = "cpu", dtype: torch.dtype | None = None) -> TrainedModel:
    """The model of a run or a model folder, or one with fresh weights by the name of a configuration.

    Args:
        what: the folder of a run, a folder in Hugging Face's layout, a configuration file, or the name of a small
            trained model, of a built-in configuration or of a preset.
        device: the device of the model.
        dtype: the dtype of the weights; None keeps theirs.

    Raises:
        FileNotFoundError: nothing of that name; the nearest is named.
        ValueError: a model of a kind that is not known.
    """
    if Path(what).is_dir() or what in small_models():
        return load_trained(what, device, dtype)
    try:
        found = find_config(what, "train", also=small_models())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no folder {what!r}; {error}") from error
    return fresh_model(what, load_config(found), device, dtype)


def document(subject: TrainedModel, name: str, options: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """A result with its model and options, as a dict for JSON.

    Args:
        subject: the model that was measured.
        name: name of the evaluation.
        options: the given options, shared ones included.
        result: a dataclass.
    """
    return {
        "evaluation": name,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        "model": subject.title,
        "checkpoint": subject.identity,
        "context": subject.context,
        "machine": describe_machine(),
        "result": as_json(result),
    }


def as_json(value: Any) -> Any:
    """A value of dataclasses, arrays and numbers for JSON: nan becomes null, other numbers have six digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def file_name(name: str, options: Mapping[str, Any]) -> str:
    """The name of an evaluation's files, which depends on its options; of paths it has the last part."""
    parts = [name]
    for key, value in options.items():
        several = value if isinstance(value, tuple) else (value.name if isinstance(value, Path) else value,)
        parts.append(f"{key}={'-'.join(map(str, several))}")
    return re.sub(r"[^\w.=-]+", "-", "-".join(parts)).strip("-")


def check_own(folder: Path, name: str, title: str) -> None:
    """Raise where writing a model's result would overwrite another's.

    Args:
        folder: the folder of results.
        name: name of the files, without an ending.
        title: title of the model.

    Raises:
        FileExistsError: the file holds a result of another model, or no result.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return
    try:
        other = parse_json(path.read_bytes())["model"]
    except (ValueError, TypeError, KeyError):
        other = "no evaluation"
    if other != title:
        raise FileExistsError(f"--out: expected a folder of its own for {title}, and {str(path)!r} is of {other}")


def save(
    folder: Path, name: str, found: Mapping[str, Any], figure: Figure | None, page: str | None = None
) -> list[Path]:
    """Write a result, and its figure and page if given, each file whole or not at all.

    Args:
        folder: the folder, made if it does not exist.
        name: name of the files, without an ending.
        found: the result as :func:`document` returns it.
        figure: the figure.
        page: an HTML page.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {".json": json.dumps(found, indent=1, allow_nan=False) + "\n"}
    contents |= {".svg": written(figure, name)} if figure is not None else {}
    contents |= {".html": page} if page is not None else {}
    for suffix, content in contents.items():
        write_whole(folder / f"{name}{suffix}", content)
    return [folder / f"{name}{suffix}" for suffix in contents]
