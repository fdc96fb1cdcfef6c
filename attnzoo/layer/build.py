"""``build_attention``: a layer from the defaults of a variant's paper, a block preset, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from attnzoo.algebra.pruning import Prune
from attnzoo.errors import check_kinds, in_section, unknown
from attnzoo.forgetting.rules import Forgetting
from attnzoo.layer.attention import Attention
from attnzoo.layer.config import BLOCKS, CHOICES, INSTEAD, NEEDS, OFF, AttentionConfig
from attnzoo.layer.gates import gate_classes, gate_options
from attnzoo.registry import get


def build_attention(
    name: str,
    *,
    hidden_size: int = 768,
    num_heads: int = 12,
    block: str | None = None,
    acp: bool | Prune = False,
    impl: str = "auto",
    forgetting: Forgetting | None = None,
    keep_carries: bool = False,
    **options: Any,
) -> Attention:
    """An attention layer of variant ``name``, with the defaults of its paper.

    Args:
        name: any of ``list_variants()``.
        hidden_size: D.
        num_heads: H.
        block: None for the paper's own layer, ``"llama"`` for the bare one (projections only), ``"pro"`` for FoX's Pro
            block: QK-norm, KV-shift, output norm and sigmoid output gate, ``"gated"`` for the one that linear
            recurrences often have: short convolution, output norm and swish output gate, ``"hgrn2"`` for HGRN2's
            (``gla`` and its dual alone). Keys of the delta rule must have unit length and keep their L2 norm in every
            block, and keys that a gate makes have none.
        acp: Adaptive Computation Pruning: True for ``Prune()``, or a :class:`~attnzoo.Prune`. On the linear side,
            states that are certified to weigh so little are not carried on.
        impl: ``"auto"`` (by device), ``"triton"``, ``"fla"``, ``"sdpa"`` or ``"reference"``; an explicit choice never
            falls back.
        forgetting: options of One-Pass Forgetting, an :class:`~attnzoo.Forgetting`; for the softmax side. None: without
            it. It runs on the variant's kernels where ``impl="auto"`` takes these and its network reads keys alone.
        keep_carries: PaTH's kernels keep their carried queries and keys for the backward pass, which otherwise computes
            them again. Faster, for about 33 K bytes per token and key head in 16 bits, K being the head dim. Outputs
            and gradients do not change. For ``path``, ``path_fox`` and both with a rotation.
        options: fields of :class:`AttentionConfig` and options of the variant's gate projection.

    Raises:
        ValueError: an unknown name or option (the nearest one is named), or one that does not serve this variant.
    """
    variant = get(name)
    defaults = dict(getattr(variant.module, "LAYER", {}))
    settings: dict[str, Any] = {"hidden_size": hidden_size, "num_heads": num_heads, **defaults}
    known = {field.name for field in fields(AttentionConfig)}
    for default in defaults:
        if default not in known | set(taken := gate_options(gate_classes(defaults.get("gate", "none")))):
            raise unknown("option", default, sorted(known | set(taken)), of=f"the layer of {name!r}")
    for option in REFUSED.keys() & options.keys() - known:
        raise ValueError(f"{option}: expected no such option ({REFUSED[option]}), got {options[option]!r}")
    check_kinds(options, AttentionConfig.__annotations__, CHOICES)
    if block is not None:
        if not isinstance(block, str) or block not in BLOCKS:
            raise unknown("block", block, BLOCKS)
        settings |= BLOCKS[block]
    classes = gate_classes(options.get("gate", settings.get("gate", "none")))
    for option in options:
        if option not in known | set(gate_options(classes)):
            known |= set(gate_options(classes)) | BUILD_OPTIONS
            raise unknown("option", option, sorted(known), of=repr(name))
    if block is not None and any(cls.unit_keys for cls in classes):
        settings["qk_norm"] = "l2"
    if block is not None and any(cls.makes_keys for cls in classes):
        settings["qk_norm"] = "none"
    settings |= options
    for given, default in INSTEAD.items():
        if options.get(given) is not None and default not in options:
            settings.pop(default, None)
    for option, parts in NEEDS.items():  # a part that was switched off takes its details with it
        if option not in options and any(settings.get(part) in OFF for part in parts):
            settings.pop(option, None)
    gate_settings = {key: settings.pop(key) for key in list(settings) if key not in known}
    gate_settings = {key: value for key, value in gate_settings.items() if key in gate_options(classes)}
    return Attention(
        variant, AttentionConfig(**settings), gate_settings, prune=_prune(acp), impl=impl, forgetting=forgetting,
        keep_carries=keep_carries,
    )  # fmt: skip


BUILD_OPTIONS = {"block", "acp", "impl", "forgetting", "keep_carries"}
_WHY = {
    "no paper of a variant drops attention weights; drop what the layer returns": (
        "dropout", "dropout_p", "attn_dropout", "attention_dropout", "attn_pdrop", "attn_drop", "proj_drop",
        "resid_pdrop", "resid_dropout",
    ),
    "every layer is causal": ("causal", "is_causal"),
    "a layer takes any length": ("block_size", "max_seq_len", "max_position_embeddings", "context_length"),
    "x is [B, T, D] everywhere": ("batch_first", "layout"),
    "the projections' own are qkv_bias and output_bias": ("bias",),
    "D is hidden_size": ("d_model", "dim", "embed_dim", "n_embd"),
    "a layer is a module: build_attention(...).to(device, dtype)": ("device", "dtype"),
}  # fmt: skip
REFUSED = {option: why for why, options in _WHY.items() for option in options}


def _prune(acp: bool | Prune) -> Prune | None:
    if isinstance(acp, Prune):
        return acp
    if not isinstance(acp, bool):
        raise TypeError(f"acp: expected True, False or attnzoo.Prune, got {acp!r}")
    return Prune() if acp else None


def from_file(options: dict[str, Any]) -> dict[str, Any]:
    """Layer options with a file's mappings (`acp: {eps: 1e-4}`, `forgetting: {window: 8}`) turned into objects."""
    made: dict[str, Any] = {}
    for option, kind in (("acp", Prune), ("forgetting", Forgetting)):
        given = options.get(option)
        if isinstance(given, Mapping):
            known = [field.name for field in fields(kind)]
            for key in given:
                if key not in known:
                    raise unknown("option", key, known, of=option)
            try:
                made[option] = kind(**given)
            except ValueError as error:
                raise ValueError(in_section(str(error), f"{option}.", known)) from error
    return {**options, **made}
