"""The tensors and settings of a model folder, with a record of what has been read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import unknown
from attnzoo.files import json_object

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class Weights:
    """Tensors by the peer's names.

    Args:
        names: all there are.
        read: gives one of them.
    """

    def __init__(self, names: Iterator[str] | list[str], read: Callable[[str], Tensor]) -> None:
        self.names, self.read = frozenset(names), read
        self.unread = set(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __call__(self, name: str) -> Tensor:
        """The tensor of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in self.names:
            raise unknown("weight", name, sorted(self.names))
        self.unread.discard(name)
        return self.read(name)

    def skip(self, name: str) -> None:
        """A tensor that says nothing that the configuration does not say (a tied head, a table of angles)."""
        self.unread.discard(name)

    @staticmethod
    def of_folder(folder: Path) -> Weights:
        """Those of a folder in Hugging Face's layout: safetensors, in one file or several, or a pickled state dict.

        Raises:
            FileNotFoundError: none of these is there.
            ValueError: one of them cannot be read.
        """
        try:
            return Weights._of_folder(folder)
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # safetensors and pickle raise kinds of their own
            raise ValueError(f"{folder}: its weights cannot be read: {error}") from error

    @staticmethod
    def _of_folder(folder: Path) -> Weights:
        from safetensors import safe_open

        if (folder / WHOLE).is_file():  # beside an index, too: saved again over shards
            parts: dict[str, list[str]] = {WHOLE: []}
        elif (folder / INDEX).is_file():
            parts = _parts(folder / INDEX)
        elif (folder / PICKLED).is_file():
            return Weights.of_state(_pickled(folder / PICKLED))
        elif (folder / PICKLED_INDEX).is_file():
            state: dict[str, Tensor] = {}
            for part, said in _parts(folder / PICKLED_INDEX).items():
                found = _pickled(folder / part)
                _check_part(part, said, found)
                state |= found
            return Weights.of_state(state)
        else:
            names = f"{WHOLE}, {PICKLED}, or an index of parts of one of them"
            raise FileNotFoundError(f"{folder}: expected {names}, found none of them")
        opened = {part: safe_open(folder / part, "pt") for part in parts}
        files: dict[str, str] = {}
        for part, said in parts.items():
            there = opened[part].keys()  # type: ignore[no-untyped-call]
            _check_part(part, said, there)
            files |= dict.fromkeys(there, part)
        return Weights(list(files), lambda name: opened[files[name]].get_tensor(name))  # type: ignore[no-untyped-call]

    @staticmethod
    def of_state(state: Mapping[str, Tensor]) -> Weights:
        """Those of a state dict."""
        return Weights(list(state), lambda name: state[name].detach().clone())


def _parts(index: Path) -> dict[str, list[str]]:
    """The files that an index names -> the tensors that it says each of them holds."""
    place = json_object(index.read_bytes(), index.name).get("weight_map")
    if not isinstance(place, dict) or not all(isinstance(part, str) for part in place.values()):
        raise ValueError(f"{index.name}: expected a weight_map, from the names of tensors to those of files")
    found: dict[str, list[str]] = {}
    for name, part in place.items():
        found.setdefault(part, []).append(name)
    return found


def _check_part(part: str, said: Sequence[str], there: Collection[str]) -> None:
    """Refuse a part of the weights without a tensor that its index places there; it may hold others."""
    missing = sorted(set(said).difference(there))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{part} does not hold {missing[0]}{more}, and the index says that it does")


def _pickled(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(file, weights_only=True, mmap=True)
    return found


class Settings:
    """A peer's configuration, of which every field that changes what the model computes must be understood.

    Args:
        fields: as `config.json` holds them.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def __getitem__(self, name: str) -> Any:
        if self.fields.get(name) is None:
            raise ValueError(f"config.json: expected a value of {name!r}, found none")
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where it is missing or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a model in which `name` is something else; missing and null mean the first.

        Raises:
            ValueError: it is.
        """
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"config.json: {name} = {value!r} is not supported (only {', '.join(map(repr, allowed))})")
