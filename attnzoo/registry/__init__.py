"""The registry: pairs of a linear recurrence and its softmax dual, and look-ups of variants by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from attnzoo.algebra.gate import declare, undeclare
from attnzoo.algebra.parts import GatePart, groups
from attnzoo.algebra.readout import Readout
from attnzoo.algebra.transitions import Transition
from attnzoo.errors import UnavailableError, did_you_mean_path, message, nearest, unknown
from attnzoo.files import digest, digest_being_run, run_file
from attnzoo.forms.checked import CheckedForms, checked_extend, form_set
from attnzoo.parallel.attention import shared
from attnzoo.registry.pair import Pair, Side, check_pair, check_parts
from attnzoo.registry.readout_variant import READOUT_VARIANTS, ReadoutVariant, check_readout_variant
from attnzoo.registry.table import BUILT_IN, KNOWN_AS
from attnzoo.registry.variant import Variant, is_own, with_readout

_pairs: dict[str, Pair] = {}  # pairs by the name of either side
_others: dict[str, ReadoutVariant] = {}  # variants of other readouts by name
_digests: dict[str, str] = {}  # of the files that were registering variants as they were run, by name
SHOWS_ALL = "attnzoo list"
FILES = "ATTNZOO_FILES"  # of the environment: Python files that register pairs, as PATH lists folders
_broken: list[str] | None = None  # errors of plugins, in words; None before they are loaded


def register(pair: Pair) -> None:
    """Add a pair: both names become known to :func:`get`, the tests' parameters and the command line.

    Args:
        pair: the row, with the modules that hold its two sides.

    Raises:
        TypeError: not a :class:`Pair`, one whose names (of modules, too) are none, whose parts are no tuple, whose
            layers are no mappings, or whose transition is none.
        ValueError: a name that is taken, given twice or none for a file, an unknown gate part, one given twice, w
            without beta or the other way round, or a layer or a transition beside a module.
    """
    check_pair(pair)
    for name in (pair.linear, pair.softmax):
        if name in _others or (name in _pairs and _pairs[name] != pair):
            raise ValueError(f"pair: expected new names, got {name!r}, which is registered already")
    _pairs[pair.linear] = _pairs[pair.softmax] = pair
    _digests[pair.linear] = _digests[pair.softmax] = digest_being_run()


def register_readout(
    name: str, readout: Readout, of: str, *, title: str = "", layer: Mapping[str, Any] | None = None
) -> None:
    """Add a variant: another readout of the gate of a variant that there is.

    Args:
        name, readout, of, title, layer: see :class:`~attnzoo.registry.readout_variant.ReadoutVariant`.

    Raises:
        TypeError: not a :class:`~attnzoo.algebra.readout.Readout`, or a layer that is no mapping.
        ValueError: a name that is taken or none for a file, an unknown variant, a part that is none of readouts, or a
            gate that the readout refuses.
    """
    _add(ReadoutVariant(name, readout, of, title, {} if layer is None else layer))


def _add(one: ReadoutVariant) -> None:
    check_readout_variant(one, {*_pairs, *_others}, {name: pair.requires for name, pair in _pairs.items()})
    _others[one.name] = one
    _digests[one.name] = digest_being_run()


def unregister_readout(name: str) -> None:
    """Remove a variant of :func:`register_readout`.

    Raises:
        ValueError: no such variant.
    """
    if name not in _others:
        raise unknown("variant", name, _others)
    del _others[name], _digests[name]
    _get.cache_clear()


def register_part(name: str, part: GatePart, factor: Transition | None = None) -> None:
    """Add a gate part: ``Gate(name=...)`` takes it, and inputs are drawn and checked as it says.

    Args:
        name: of the part, by which :class:`attnzoo.Gate` is given it.
        part: its shape, range, sampler, neutral value, symbols, factor of R_t and gate projections, and whether it
            may expand; then nothing that reads it is pruned.
        factor: the transition of that factor, from which pairs with the part are made that name no transition.

    Raises:
        TypeError: not a :class:`~attnzoo.algebra.parts.GatePart`, or a factor that is no transition.
        ValueError: a name that is taken or no identifier, a factor that does not read the part, or a part that has one
            and says no matrix.
    """
    if factor is not None and not isinstance(factor, Transition):
        raise TypeError(f"factor: expected an object of a class Transition, got {factor!r}")
    if factor is not None and name not in factor.parts:
        raise ValueError(f"factor: expected one whose parts have {name!r}, got {', '.join(factor.parts) or 'none'}")
    if factor is not None and isinstance(part, GatePart) and not part.carries:
        raise ValueError(f"part.matrix: expected the matrix of {name}'s factor of R_t, got None")
    declare(name, part)
    if factor is not None:
        importlib.import_module("attnzoo.recurrences.products").FACTORS.append(factor)


def unregister_part(name: str) -> None:
    """Take the part that was registered last out again, and its factor.

    Raises:
        ValueError: it is not the last, or a variant requires it.
    """
    users = [pair.linear for pair in dict.fromkeys(_pairs.values()) if name in pair.requires]
    users += [one.name for one in _others.values() if name in one.readout.parts]
    if users:
        raise ValueError(f"name: expected a part that no variant requires, and {', '.join(users)} requires {name!r}")
    undeclare(name)
    products = importlib.import_module("attnzoo.recurrences.products")
    products.FACTORS[:] = [factor for factor in products.FACTORS if name not in factor.parts]


def unregister(pair: Pair) -> None:
    """Remove a pair.

    Raises:
        TypeError: not a :class:`Pair`.
        ValueError: one of its names is not registered, or as another pair's.
    """
    if not isinstance(pair, Pair):
        raise TypeError(f"pair: expected attnzoo.Pair, got {type(pair).__name__}")
    for name in (pair.linear, pair.softmax):
        if name not in _pairs:
            raise unknown("variant", name, _pairs, see=SHOWS_ALL)
        if _pairs[name] != pair:
            raise ValueError(f"pair: expected the one that is registered as {name!r}, got another of that name")
    for name in (pair.linear, pair.softmax):
        del _pairs[name], _digests[name]
    _get.cache_clear()


def pairs() -> tuple[Pair, ...]:
    """Every pair, the built-in ones first, then what entry points and :func:`register` added."""
    broken_plugins()
    return tuple(dict.fromkeys(_pairs.values()))


def list_variants(side: Side | None = None) -> tuple[str, ...]:
    """Names of variants, in the order of the table.

    Args:
        side: ``"linear"`` or ``"softmax"`` for one side alone, ``"other"`` for the variants of other readouts; None for
            the pairs: the linear side, then the softmax side.

    Raises:
        ValueError: another side.
    """
    if side not in (None, "linear", "softmax", "other"):
        raise unknown("side", side, ("linear", "softmax", "other"))
    if side == "other":
        broken_plugins()
        return tuple(_others)
    sides: tuple[Side, ...] = ("linear", "softmax") if side is None else (side,)
    return tuple(getattr(pair, s) for s in sides for pair in pairs())


def get(name: str) -> Variant:
    """The variant of that name, always the same object.

    Args:
        name: any of :func:`list_variants`.

    Raises:
        TypeError: not a string.
        ValueError: no such variant; the message lists them, names the nearest and says which plugins are broken.
        UnavailableError: the module that a plugin names for it cannot be imported.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of a variant, got {name!r}")
    return _get(name)


@functools.cache
def _get(name: str) -> Variant:
    if name not in _pairs and name not in _others:
        broken = "".join(f"; {problem}" for problem in broken_plugins())
        if name not in _pairs and name not in _others:
            other = KNOWN_AS.get(name.casefold().replace("-", "_"))
            known = f" ({name!r} is {other})" if other else ""
            every = [*list_variants(), *list_variants("other")]
            own = "" if known or nearest(name, every) else "one of a file of yours (`attnzoo --with FILE.py ...`)"
            raise ValueError(f"{unknown('variant', name, every, own, see=SHOWS_ALL)}{known}{broken}")
    if name in _others:
        return with_readout(get(_others[name].of), _others[name])
    pair = _pairs[name]
    side: Side = "linear" if name == pair.linear else "softmax"
    module = _module(pair, side)
    forms = form_set(module)
    return Variant(
        name=name,
        side=side,
        title=getattr(module, "TITLE", name),
        paper=getattr(module, "PAPER", "") or pair.paper,
        requires=pair.requires,
        pair=pair,
        forms=MappingProxyType(CheckedForms(name, pair.requires, forms, shared)),
        extend=checked_extend(name, pair.requires, side, forms),
        module=module,
        form_set=forms,
        own=is_own(forms),
        lookup=get,
    )


def _module(pair: Pair, side: Side) -> ModuleType:
    """The module of one side of a pair: the named one, the file of its name, or one made from its parts."""
    name, given = getattr(pair, side), getattr(pair, f"{side}_module")
    home = f"attnzoo.{'recurrences' if side == 'linear' else 'encodings'}"
    if pair in BUILT_IN and importlib.util.find_spec(f"{home}.{name}") is not None:
        return importlib.import_module(f"{home}.{name}")
    if given:
        try:
            return importlib.import_module(given)
        except (Exception, SystemExit) as error:
            raise UnavailableError(f"variant {name!r}: its module {given!r} cannot be imported: {error!r}") from error
    made = ModuleType(f"{home}.{name}", f"Made of its gate's parts: {', '.join(pair.requires) or 'none'}.")
    products = importlib.import_module(f"{home}.products")
    forms, layer = getattr(products, f"{side}_forms"), getattr(products, f"{side}_layer")
    alone = [_first_of(group) for group in groups(pair.requires) if set(group) != set(pair.requires)]
    papers = dict.fromkeys(get(getattr(of_part, side)).paper for of_part in alone if of_part is not None)
    made.__dict__.update(
        FORMS=forms(*pair.requires, transition=pair.transition),
        LAYER=layer(*pair.requires) | dict(getattr(pair, f"{side}_layer")),
        PAPER=pair.paper or (f"parts of {'; '.join(papers)}" if papers else ""),
    )
    return made


def pair_for(parts: Collection[str]) -> Pair:
    """The pair whose gate has exactly these parts; of two such pairs the one whose decay depends on the input.

    Args:
        parts: any set of those of :class:`attnzoo.Gate`, ``w`` and ``beta`` together.

    Raises:
        TypeError: one name in place of a collection of them.
        ValueError: an unknown part, w without beta or the other way round, or parts that no pair has.
    """
    check_parts("parts", parts)
    found = _first_of(parts)
    if found is None:
        raise ValueError(f"parts: expected those of a pair, got {', '.join(parts)}")
    return found


def _first_of(parts: Collection[str]) -> Pair | None:
    """The pair of :func:`pair_for`, or None where no pair has these parts."""
    found = [pair for pair in pairs() if set(pair.requires) == set(parts)]
    return next((pair for pair in found if not pair.g.startswith("-")), found[0] if found else None)


def dual(name: str) -> Variant:
    """The other side of the pair that ``name`` belongs to: ``dual("fox")`` is ``get("mamba2")``.

    Raises:
        ValueError: no such variant.
    """
    return get(name).dual


def broken_plugins() -> list[str]:
    """The entry points of the group ``attnzoo.variants``, and the files of ``ATTNZOO_FILES``, that could not be used,
    each with its error.

    Pairs of working entry points are registered; the first call also warns of broken ones (RuntimeWarning).
    """
    global _broken
    if _broken is None:
        _broken = []
        for point in entry_points(group="attnzoo.variants"):
            try:
                offered = point.load()
                for one in offered if isinstance(offered, (list, tuple)) else [offered]:
                    (_add if isinstance(one, ReadoutVariant) else register)(one)
            except (Exception, SystemExit) as error:
                said = " ".join(message(error).split())
                _broken.append(f"entry point {point.name!r} of attnzoo.variants ({point.value}) is broken: {said}")
        for file in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
            try:
                from_file(file)
            except (ValueError, OSError) as error:
                _broken.append(f"a file of {FILES} is broken: {error}")
        for problem in _broken:
            warnings.warn(problem, RuntimeWarning, stacklevel=3)
    return _broken


def digest_of(name: str) -> str:
    """The digest of the Python file that registered a variant as it was run; empty for any other name."""
    broken_plugins()
    return _digests.get(name, "")


def file_of(name: str) -> Path | None:
    """The Python file that registered a variant when :func:`from_file` ran it, while it has the same text, or None."""
    paths = [Path(path) for path in os.environ.get(FILES, "").split(os.pathsep) if path]
    text = digest_of(name)
    return next((path for path in paths if text and path.is_file() and digest(path) == text), None)


def names_of(word: str) -> tuple[str, ...]:
    """The variants that a word of a command line means: one by its name, those that a ``FILE.py`` registers when it is
    run, or one of them as ``FILE.py:NAME``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown name, or a file that fails or registers no pair.
    """
    found = re.fullmatch(r"(.+\.py)(?::(.*))?", word)
    if found is None:
        return (get(word).name,)
    file, name = found.groups()
    names = from_file(file)
    if name is not None and name not in names:
        raise unknown("variant", name, names, of=file)
    return names if name is None else (name,)


def from_file(file: str | Path) -> tuple[str, ...]:
    """The variants that a Python file registers when it is run, which it is once, here and in processes to come.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it fails or registers none.
    """
    path = Path(file).resolve()
    if not path.is_file():
        close = None if str(file).endswith(".py") else nearest(file, [*list_variants(), *list_variants("other")])
        hint = f"; did you mean `attnzoo show {close}`?" if close else did_you_mean_path(file)
        raise FileNotFoundError(f"{str(file)!r}: expected a Python file that registers variants, found none{hint}")
    broken_plugins()
    run_file(path)
    text = digest(path)
    names = tuple(name for name, of in _digests.items() if of == text)
    if not names:
        how = "a pair (attnzoo.register) or a readout (attnzoo.register_readout)"
        raise ValueError(f"{file}: expected a file that registers {how}, and it registers none")
    os.environ[FILES] = os.pathsep.join(dict.fromkeys([*os.environ.get(FILES, "").split(os.pathsep), str(path)]))
    return names


for _pair in BUILT_IN:
    register(_pair)
for _other in READOUT_VARIANTS:
    _add(_other)
