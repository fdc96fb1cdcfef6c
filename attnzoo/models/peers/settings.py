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

SWITCHED_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
# fields that do not change what a model computes, or that whoever builds it reads elsewhere
NAMES = """
    A_init_range _attn_implementation _name_or_path architectures attn_mode auto_map bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size chunk_size_feed_forward correction_factor
    decoder_start_token_id dt_init_floor dt_max dt_min dtype early_stopping eos_token_id full_attn_mod
    fuse_cross_entropy fuse_norm fuse_swiglu gate_init_bias id2label initializer_range interpolate_factor
    keys_to_ignore_at_inference label2id length_penalty linear_a_log_max linear_dt_init_floor linear_dt_max
    linear_dt_min mamba_ssm_dtype max_length max_position_embeddings max_window_layers model_max_length model_type
    mrope_interleaved mrope_section mtp_num_hidden_layers mtp_use_dedicated_embeddings n_ctx num_beam_groups
    num_beams num_return_sequences output_scores pad_token_id pretraining_tp problem_type repetition_penalty
    rescale_prenorm_residual return_dict rms_norm sep_token_id summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params temperature tie_word_embeddings time_step_floor time_step_max
    time_step_min time_step_rank tokenizer_class top_k top_p torch_dtype transformers_version typical_p use_cache
    use_l2warp vocab_size

    moe_intermediate_size moe_layer_freq moe_renormalize moe_router_activation_func n_group n_shared_experts
    norm_topk_prob num_expert_group num_experts_per_tok num_experts_per_token num_shared_experts
    output_router_logits routed_scaling_factor router_aux_loss_coef shared_expert_intermediate_size topk_group
    use_grouped_topk
"""  # the last of experts, which are refused
HARMLESS = frozenset((*NAMES.split(), *QUANTISED))
WIDTHS = ("hidden_size", "intermediate_size", "state_size", "_heads", "head_dim", "kernel_dim")  # how their names end


class Settings:
    """A peer's configuration, of which every field that changes what the model computes must be understood.

    Args:
        fields: the fields of `config.json`.
        place: the beginning of error messages: the file, and for nested fields the field's name.

    Attributes:
        read: names of the fields that have been asked for.
    """

    def __init__(self, fields: Mapping[str, Any], place: str = "config.json: ") -> None:
        self.fields, self.place = fields, place
        self.read = set[str]()

    def __contains__(self, name: str) -> bool:
        return self.raw(name) is not None

    def raw(self, name: str) -> Any:
        """The field's value, of any kind, or None where it is missing or null."""
        self.read.add(name)
        return self.fields.get(name)

    def says(self, name: str) -> bool:
        """Whether the field is there, null or not."""
        self.read.add(name)
        return name in self.fields

    def beside(self, more: Mapping[str, Any]) -> Settings:
        """These settings with other values of some fields."""
        found = Settings({**self.fields, **more}, self.place)
        found.read = self.read
        return found

    def unread(self) -> tuple[str, ...]:
        """A remark on fields that are on and that nothing has asked for; empty where there are none."""
        left = [name for name, x in self.fields.items() if name not in self.read | HARMLESS and x not in SWITCHED_OFF]
        return (f"{self.place}{', '.join(left)}: not read, as nothing here is like it",) if left else ()

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
        value = self.raw(name)
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
        value = self.raw(name)
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
        value = self.raw(name)
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
        value = self.raw(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.place}{name}: expected a mapping, got {value!r}")
        return Settings(value or {}, f"{self.place}{name}.")

    def only(self, name: str, *allowed: Any) -> None:
        """Raise where the field `name` has another value than `values`; missing and null mean the first of them.

        Raises:
            ValueError: another value, for which there is no mapping.
        """
        value = self.raw(name)
        value = allowed[0] if value is None else value
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
