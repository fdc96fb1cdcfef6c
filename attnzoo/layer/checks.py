"""Checks of an attention layer's configuration, cache and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attnzoo.algebra.pruning import Evict, Prune
from attnzoo.algebra.validation import check_flag
from attnzoo.errors import KINDS, UnavailableError, unknown
from attnzoo.forgetting.rules import Forgetting, parse_budget
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.layer.config import OF_SOFTMAX, PLAIN, AttentionConfig
from attnzoo.layer.dispatch import IMPLS
from attnzoo.layer.gates import GateProjection, gate_classes
from attnzoo.layer.gates.angles import Mamba3Decay
from attnzoo.layer.gates.matrix import checked_factors
from attnzoo.registry import get, list_variants
from attnzoo.registry.pair import Side
from attnzoo.registry.variant import Variant


def check_layer(
    variant: Variant, config: AttentionConfig, prune: Prune | None, impl: str, forgetting: Forgetting | None,
    keep_carries: bool,
) -> None:  # fmt: skip
    """Raise where a variant cannot have a layer with these arguments of it.

    Raises:
        TypeError, ValueError: see :class:`~attnzoo.layer.attention.Attention`.
    """
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"config: expected AttentionConfig, got {type(config).__name__}")
    if impl not in IMPLS:
        raise unknown("impl", impl, IMPLS)
    _check_parts(variant, config, gate_classes(config.gate), prune)
    if forgetting is not None:
        _check_forgetting(variant, forgetting, impl)
        if config.training_groups is not None:
            why = "the network learns from the later rows of the whole sequence"
            raise ValueError(f"training_groups: expected None with forgetting ({why}), got {config.training_groups}")
    _check_keeps(variant, keep_carries, forgetting is not None)


def _check_parts(
    variant: Variant, config: AttentionConfig, classes: Sequence[type[GateProjection]], prune: Prune | None
) -> None:
    """Raise where a variant cannot have a layer with this ``config`` and gate projections of these ``classes``.

    Raises:
        ValueError: missing or surplus gate parts, options of the other side, or options of keys where the gate makes
            the keys.
    """
    if prune is not None and not (variant.prunable or variant.truncates):
        linear = variant.side == "linear"
        able = _able(lambda other: other.truncates if linear else other.prunable, variant.side)
        why = "has no scalar decay to certify pruning by"
        if variant.expands:
            why = "makes vectors longer, so nothing bounds what a key may weigh later"
        elif linear and "log_decay" in variant.requires:
            why = "has no kernel that leaves out what states carry"
        if variant.readout is not None:
            why = f"is not pruned: {variant.readout.unpruned}"
        raise ValueError(f"acp: {variant.name!r} {why} (it serves {able})")
    if prune is not None and variant.truncates and prune.bound != "tail":
        raise ValueError(f"acp: expected bound='tail' (a state's weights are summed), got {prune!r}")
    provided = {part for cls in classes for part in cls.provides}
    if provided != set(variant.requires):
        raise ValueError(
            f"gate: {variant.name!r} needs the parts {', '.join(variant.requires) or 'none'}; "
            f"{config.gate!r} provides {', '.join(sorted(provided)) or 'none'}"
        )
    if any(cls.unit_keys for cls in classes) and config.qk_norm != "l2":
        raise ValueError(f"qk_norm: expected 'l2' (the gate erases along unit keys), got {config.qk_norm!r}")
    if any(cls.writes for cls in classes) and variant.side == "softmax":
        raise ValueError(
            f"gate: {config.gate!r} says how strongly tokens write, and a softmax ({variant.name!r}) has no state"
        )
    makers = [cls.__name__ for cls in classes if cls.makes_keys]
    if makers and (config.qk_norm != "none" or config.rotary is not None):
        name, kept = ("rotary", None) if config.qk_norm == "none" else ("qk_norm", "none")
        why = f"{makers[0]} makes the keys, behind the norm and the rotation"
        raise ValueError(f"{name}: expected {kept!r} ({why}), got {getattr(config, name)!r}")
    if config.qk_bias and variant.side == "softmax":
        raise ValueError("qk_bias: expected False (bounds of scores by the norms' weights do not know it), got True")
    for name in OF_SOFTMAX:
        given, none = getattr(config, name), PLAIN[name]
        if given != none and variant.side != "softmax":
            why = f"{variant.name!r} sums past tokens in one state, without a softmax"
            why = why if variant.readout is None else f"{variant.name!r} has a readout of its own, no softmax"
            raise ValueError(f"{name}: expected {none} ({why}), got {given!r}")


def _check_forgetting(variant: Variant, forgetting: Forgetting, impl: str) -> None:
    """Raise where a layer of the variant cannot have One-Pass Forgetting.

    Raises:
        TypeError: not a :class:`~attnzoo.forgetting.rules.Forgetting`.
        ValueError: a linear variant, another library's forms, or an option that the student does not support.
    """
    if not isinstance(forgetting, Forgetting):
        raise TypeError(f"forgetting: expected attnzoo.Forgetting(...) or None, got {forgetting!r}")
    if variant.readout is not None:
        why = f"{variant.name!r} has a readout of its own, and what is forgotten is learnt for a softmax"
        raise ValueError(f"forgetting: {why} (as {variant.dual.name!r} has)")
    if variant.side == "linear":
        why = f"{variant.name!r} is the linear side: its state is a sum, from which no key can be dropped"
        raise ValueError(f"forgetting: {why} (its dual {variant.dual.name!r} can forget)")
    if not isinstance(variant.form_set, SoftmaxForms):
        raise ValueError(f"forgetting: expected a variant whose FORMS are SoftmaxForms, got {variant.name!r}")
    if impl not in ("auto", "reference"):
        raise ValueError(f"impl: expected 'auto' or 'reference' with forgetting (not all of it has a kernel): {impl!r}")


def _check_keeps(variant: Variant, keep_carries: bool, forgets: bool) -> None:
    """Raise where ``keep_carries`` is asked for and the variant's kernels have no carries to keep.

    Raises:
        TypeError: not True or False.
        ValueError: no such kernels, or a layer with One-Pass Forgetting, which no kernel computes.
    """
    check_flag("keep_carries", keep_carries)
    if not keep_carries:
        return
    if forgets:
        raise ValueError("keep_carries: expected False with forgetting (no kernel serves what learns it), got True")
    if not _keeps(variant):
        why = f"the kernels of {variant.name!r} carry nothing that they could keep"
        raise ValueError(f"keep_carries: expected False ({why}; it serves {_able(_keeps)}), got True")


def _keeps(variant: Variant) -> bool:
    forms = variant.form_set
    return "triton" in forms.forms and "keep_carries" in forms.options("triton")


def keys_per_token(
    variant: Variant, config: AttentionConfig, classes: Sequence[type[GateProjection]], options: Mapping[str, Any]
) -> int:
    """The number n of keys and values that a token writes for each head: as many as its transition has factors, and two
    by the trapezoidal rule.

    Raises:
        ValueError: n > 1 where a token must have one value.
    """
    if options.get("trapezoid") is True and Mamba3Decay in classes:
        if sum(cls.writes for cls in classes) > 1:
            raise ValueError(
                f"trapezoid: expected False with a second write strength in gate={config.gate!r}, got True"
            )
        return 2
    number = options.get("num_householder", 1) if any(cls.unit_keys for cls in classes) else 1
    if not KINDS["int"][1](number):  # the gate projection raises
        return 1
    if number > 1 and variant.readout is not None:
        raise ValueError(f"num_householder: expected 1 ({variant.name!r} reads one key per token), got {number}")
    alone = [name for name in ("skip", "bonus", "query_correction") if getattr(config, name)]  # of one key and value
    if number > 1 and (alone or sum(cls.writes for cls in classes) > 1):
        what = alone[0] if alone else f"a second write strength in gate={config.gate!r}"
        raise ValueError(f"num_householder: expected 1 with {what} (a token has several keys and values), got {number}")
    return checked_factors(number)


def check_cache(
    variant: Variant,
    config: AttentionConfig,
    forgetting: Forgetting | None,
    evict: float | str | Evict | None,
    budget: int | str | None,
) -> None:
    """Raise where a layer cannot have such a cache; see :meth:`attnzoo.layer.attention.Attention.new_cache`.

    Raises:
        ValueError: see there.
    """
    settings = None if evict is None else Evict.of(evict)
    if not variant.causal:
        raise ValueError(f"cache: expected none for {variant.name!r}, whose outputs change with later tokens")
    if forgetting is None and budget is not None:
        raise ValueError(f"budget: expected None (no forget network says what goes first), got {budget!r}")
    parse_budget(budget)
    if forgetting is not None and not forgetting.monotone:
        raise ValueError("cache: expected forgetting.monotone=True (else what is gone may be asked for), got False")
    if forgetting is not None and settings is not None and settings.offload:
        raise ValueError("evict: expected a weight where the layer forgets, got 'offload'")
    if settings is not None and not evicts(variant, config):
        able = _able(lambda other: other.prunable and _has_pages(other))
        lacks = "its keys lie in no pages" if not _has_pages(variant) else "nothing decays"
        why = f"{variant.name!r} needs all its keys: {lacks} (it serves {able} and windows)"
        if variant.side == "linear":
            why = f"{variant.name!r} is the linear side, whose state does not grow"
        if variant.readout is not None:
            why = f"no key of {variant.name!r} is given up: {variant.readout.unpruned}"
        raise ValueError(f"evict: {why}")
    bounded = config.qk_norm != "none" or config.softcap is not None or config.window is not None
    if settings is not None and not bounded and not settings.offload:
        how = "expected None or a layer with qk_norm or softcap, which bound later scores"
        how += ", or 'offload'" if forgetting is None else ""
        raise ValueError(f"evict: {how}, got {evict!r} and qk_norm='none'")


def evicts(variant: Variant, config: AttentionConfig) -> bool:
    """Whether keys may be evicted: by forget gates, or behind a window."""
    return (variant.prunable or config.window is not None) and _has_pages(variant)


def _able(serves: Callable[[Variant], bool], side: Side = "softmax") -> str:
    """The names of a side's variants for which ``serves`` is true; plugins that cannot be imported are left out."""
    found = []
    for name in list_variants("linear" if side == "linear" else "softmax"):
        with suppress(UnavailableError, TypeError):
            found += [name] if serves(get(name)) else []
    return ", ".join(found)


def _has_pages(variant: Variant) -> bool:
    """Whether a cache of the variant may lie in pages."""
    return bool(getattr(getattr(variant.form_set, "store", None), "pages", False))
