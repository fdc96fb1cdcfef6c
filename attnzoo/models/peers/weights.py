"""The tensors of a model folder, with a record of those that have been read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.errors import unknown
from attnzoo.files import json_object

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class Weights:
    """Tensors by the peer's names.

    Args:
        names: all names, in the order of the files.
        read: a function that returns the tensor of a name.
        dtype: a function that returns the dtype's name of a tensor without reading it.
    """

    def __init__(self, names: Sequence[str], read: Callable[[str], Tensor], dtype: Callable[[str], str]) -> None:
        self.names, self.read, self.dtype = dict.fromkeys(names).keys(), read, dtype
        self.unread = set(self.names)
        self.last = ""  # that was read
        self.place = ""  # the folder, for errors

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __call__(self, name: str) -> Tensor:
        """The tensor of that name.

        Raises:
            ValueError: no such tensor.
        """
        if name not in self.names:
            raise unknown("weight", name, sorted(self.names))
        self.unread.discard(name)
        self.last = name
        return self.read(name)

    def skip(self, name: str) -> None:
        """Mark a redundant tensor (a tied head, a table of angles) as read."""
        self.unread.discard(name)

    def rename(self, new: Callable[[str], str | None]) -> None:
        """Give each tensor the name ``new(name)``; those of None count as read and are left out.

        Raises:
            ValueError: two would have one name.
        """
        old: dict[str, str] = {}
        for name in self.names:
            after = new(name)
            if after in old:
                raise ValueError(f"{old[after]} and {name} are one weight by two names, got both")
            if after is not None:
                old[after] = name
        read, dtype = self.read, self.dtype
        self.names, self.unread = old.keys(), {after for after, name in old.items() if name in self.unread}
        self.read, self.dtype = lambda name: read(old[name]), lambda name: dtype(old[name])

    @staticmethod
    def of_folder(folder: Path) -> Weights:
        """The weights of a folder in Hugging Face's layout: safetensors, in one file or several, or a pickled state
        dict.

        Raises:
            FileNotFoundError: no such file.
            ValueError: one of them cannot be read.
        """
        try:
            found = Weights._of_folder(folder)
            found.place = f" (in {folder})"
            return found
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # safetensors and pickle raise their own errors
            raise ValueError(f"{folder}: its weights cannot be read: {error}") from error

    @staticmethod
    def _of_folder(folder: Path) -> Weights:
        from safetensors import safe_open

        if (folder / WHOLE).is_file():  # a whole file wins over an index of an earlier save in shards
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

        def dtype(name: str) -> str:
            said = str(opened[files[name]].get_slice(name).get_dtype())  # type: ignore[no-untyped-call]
            return SAFETENSORS.get(said, said)

        return Weights(list(files), lambda name: opened[files[name]].get_tensor(name), dtype)  # type: ignore[no-untyped-call]

    @staticmethod
    def of_state(state: Mapping[str, Tensor]) -> Weights:
        """The weights of a state dict."""
        return Weights(
            list(state),
            lambda name: state[name].detach().clone(),
            lambda name: str(state[name].dtype).removeprefix("torch."),
        )


def _parts(index: Path) -> dict[str, list[str]]:
    """The files of an index, each with the names of its tensors."""
    place = json_object(index.read_bytes(), index.name).get("weight_map")
    if not isinstance(place, dict) or not all(isinstance(part, str) for part in place.values()):
        raise ValueError(f"{index.name}: expected a weight_map, from the names of tensors to those of files")
    for part in place.values():
        if Path(part).name != part or part == "..":
            raise ValueError(f"{index.name}: expected names of files of its own folder, got {part!r}")
    found: dict[str, list[str]] = {}
    for name, part in place.items():
        found.setdefault(part, []).append(name)
    return found


def _check_part(part: str, said: Sequence[str], there: Collection[str]) -> None:
    """Raise where a file lacks a tensor that the index lists in it; it may hold others."""
    missing = sorted(set(said).difference(there))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{part} does not hold {missing[0]}{more}, and the index says that it does")


def _pickled(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(file, weights_only=True, mmap=True)
    if not isinstance(found, dict):
        raise ValueError(f"{file.name}: expected tensors by their names, got {type(found).__name__}")
    for name, x in found.items():
        if not isinstance(name, str) or not isinstance(x, Tensor) or x.layout != torch.strided:
            kind = x.layout if isinstance(x, Tensor) and isinstance(name, str) else type(x).__name__
            raise ValueError(f"{file.name}: expected tensors by their names, got {kind} by {name!r}")
    return found
