"""A peer's configuration, whose fields are checked where they are read; fields with the same meaning must agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from attnzoo.errors import WIDEST, check_kinds, unknown
from attnzoo.models.config import DEEPEST

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
# fields of transformers, MLX and older releases
QUANTISED = ("quantization_config", "quantization", "compression_config")

WIDTHS = ("hidden_size", "intermediate_size", "state_size", "_heads", "head_dim", "kernel_dim")  # how their names end


class Settings:
    """A peer's configuration, of which every field that changes what the model computes must be understood.

    Args:
        fields: the fields of `config.json`.
        place: the beginning of error messages: the file, and for nested fields the field's name.
    """

    def __init__(self, fields: Mapping[str, Any], place: str = "config.json: ") -> None:
        self.fields, self.place = fields, place

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def __getitem__(self, name: str) -> int:
        """The size in a required field."""
        found: int = self.required(name, "int")
        return found

    def required(self, name: str, kind: str) -> Any:
        """The value of a required field, of a kind that :func:`~attnzoo.errors.check_kinds` knows.

        Raises:
            ValueError: the field is missing or of another kind.
        """
        if name not in self:
            raise ValueError(f"{self.place}expected a value of {name!r}, found none")
        return self.optional(name, kind)

    def optional(self, name: str, kind: str, least: float | None = None) -> Any:
        """The field's value, checked to be of that kind, or None where it is missing or null.

        Args:
            least: the least value allowed; None for 1 (`int`) or anything above 0 (`float`).

        Raises:
            ValueError: it is something else.
        """
        value = self.fields.get(name)
        if value is None:
            return None
        self._check(name, value, kind)
        if kind == "int" and value < (least := 1 if least is None else least):
            raise ValueError(f"{self.place}{name}: expected at least {least}, got {value}")
        if kind == "float" and least is None and value <= 0:
            raise ValueError(f"{self.place}{name}: expected a number above 0, got {value}")
        most = DEEPEST if name == "num_hidden_layers" else WIDEST if name.endswith(WIDTHS) else math.inf
        if kind == "int" and value >= most:
            raise ValueError(f"{self.place}{name}: expected a number below {most}, got {value}")
        return value

    def _check(self, name: str, value: Any, kind: str) -> None:
        try:
            check_kinds({name: value}, {name: kind})
        except ValueError as error:
            raise ValueError(f"{self.place}{error}") from None

    def get(self, name: str, default: Any, least: float | None = None) -> Any:
        """The field's value, checked to be of the default's kind, or the default where it is missing or null.

        Raises:
            ValueError: it is something else.
        """
        found = self.optional(name, type(default).__name__, least)
        return default if found is None else found

    def listed(self, name: str, kind: str, length: int | None = None) -> list[Any] | None:
        """The field's list of values of one kind, or None where it is missing or null.

        Raises:
            ValueError: it is something else, or of another length.
        """
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise ValueError(f"{self.place}{name}: expected a list, got {value!r}")
        for entry in value:
            self._check(name, entry, kind)
        if length is not None and len(value) != length:
            raise ValueError(f"{self.place}{name}: expected {length} entries, one for each layer, got {len(value)}")
        return list(value)

    def tokens(self, name: str) -> list[int]:
        """The token numbers in a field, which may hold one number or a list; empty where it is missing or null.

        Raises:
            ValueError: it is something else.
        """
        value = self.fields.get(name)
        if value is None:
            return []
        found = value if isinstance(value, list) else [value]
        for entry in found:
            self._check(name, entry, "int")
        return list(found)

    def within(self, name: str) -> Settings:
        """The fields nested in a field, empty where it is missing or null.

        Raises:
            ValueError: the field is no mapping.
        """
        value = self.fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.place}{name}: expected a mapping, got {value!r}")
        return Settings(value or {}, f"{self.place}{name}.")

    def only(self, name: str, *allowed: Any) -> None:
        """Raise where the field `name` has another value than `values`; missing and null mean the first of them.

        Raises:
            ValueError: another value, for which there is no mapping.
        """
        value = self.fields[name] if name in self else allowed[0]
        if value not in allowed:
            raise ValueError(f"{self.place}{name} = {value!r} is not supported (only {', '.join(map(repr, allowed))})")

    def said_once(self, name: str, other: str) -> None:
        """Raise where two fields with the same meaning differ; either may be missing.

        Raises:
            ValueError: the fields differ.
        """
        if name in self and other in self and self.fields[name] != self.fields[other]:
            one, two = (f"{each} = {self.fields[each]!r}" for each in (name, other))
            raise ValueError(f"{self.place}{one} and {two} say one thing twice, and differ")

    def dtype(self) -> torch.dtype | None:
        """The dtype that the configuration names, or None.

        Raises:
            ValueError: a dtype that models cannot compute in, or the field's two spellings differ.
        """
        named = {
            name: str(self.fields[name]).removeprefix("torch.") for name in ("dtype", "torch_dtype") if name in self
        }
        Settings(named, self.place).said_once("dtype", "torch_dtype")
        for name, dtype in named.items():
            if dtype not in DTYPES:
                raise ValueError(f"{self.place}{unknown(name, dtype, DTYPES)}")
        return next((DTYPES[dtype] for dtype in named.values()), None)

    def quantisation(self) -> str | None:
        """The quantisation of the weights, in words for an error; None where the configuration names none."""
        for name in QUANTISED:
            if name in self:
                how = self.fields[name]
                how = how if isinstance(how, Mapping) else {}
                bits = {4: how.get("load_in_4bit"), 8: how.get("load_in_8bit")}
                count = how.get("bits") or next((n for n, on in bits.items() if on), None)
                method = how.get("quant_method", "MLX" if name == "quantization" else "an unnamed method")
                return f"{name}: {method}" + (f", {count} bits" if count else "")
        return None
