"""One call of a form over fragments: by which transport, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import UnavailableError, unknown
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.linear import LinearForms
from attnzoo.forms.protocol import REFERENCE
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.parallel.collectives import tied, together
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.heads import by_heads, by_tokens, dealt, unshared
from attnzoo.parallel.keys import keys_after, with_earlier_keys
from attnzoo.parallel.rows import Rows, separated
from attnzoo.parallel.states import scan_states

logger = logging.getLogger(__name__)

Inputs = tuple[Tensor, Tensor, Tensor, Gate]
Transport = Literal["auto", "gather", "heads", "pruned"]


def attend(forms: Any, form: str, rows: Rows, fragments: Fragments, transport: str = "auto") -> Any:
    """The output of ``form`` for this rank's rows of a sequence that ranks share; all of them call it.

    Args:
        forms: of a variant.
        rows: this rank's, as :class:`Fragments` has them, and options without ``valid`` and ``cu_seqlens``.
        transport: see :func:`attnzoo.parallel.context_parallel`.

    Raises:
        TypeError: forms that are none of this package's kinds.
        ValueError: an option that fragments have no use for, another number of rows, or an unknown transport.
        UnavailableError: a transport that cannot serve the call.
    """
    _check_kind(forms)
    for name in ("valid", "cu_seqlens"):
        if getattr(rows.options, name) is not None:
            raise ValueError(f"{name}: expected None with fragments (they hold the documents' borders), got a tensor")
    if transport not in get_args(Transport):
        raise unknown("transport", transport, get_args(Transport))
    fragments.cut(rows.q)
    if fragments.ranks == 1 or not len(rows.q):
        return _whole(forms, form, rows, fragments.own_borders)
    found = _exchanged(forms, form, rows, fragments, transport)
    inputs = rows.named().values()  # of one token a form may leave out a gate, which comes from a window over ranks
    if isinstance(found, Tensor):
        return tied(found, *inputs)
    return together(*(tied(x, *inputs) for x in found))


def _exchanged(forms: Any, form: str, rows: Rows, fragments: Fragments, transport: str) -> Any:
    if fragments.have_whole_documents and transport != "heads":
        return _whole(forms, form, rows, fragments.own_borders)
    chosen, why = choose_transport(forms, form, rows, fragments, transport)
    _say(f"context parallelism over {fragments.ranks} ranks: {type(forms).__name__} by {chosen} ({why})")
    if chosen == "heads":
        rows, order = dealt(rows, fragments)
        found = _whole(forms, form, by_heads(rows, fragments), fragments.borders)
        if isinstance(found, Tensor):
            return by_tokens(found, fragments, order)
        return tuple(by_tokens(x, fragments, order) for x in found)
    rows = replace(rows, gate=separated(rows.gate, rows.q, fragments))
    if isinstance(forms, LinearForms):
        return scan_states(forms, form, rows, fragments)[0]
    return with_earlier_keys(forms, form, rows, fragments, pruned=chosen == "pruned")


def read(forms: Any, form: str, rows: Rows, fragments: Fragments, transport: str) -> tuple[Any, Any]:
    """:func:`attend`'s, of a sequence's beginning, and the state of one process after all tokens, on every rank."""
    if fragments.ranks == 1:
        return cast("tuple[Any, Any]", forms.go_on(form, rows.q, rows.k, rows.v, rows.gate, None, rows.options))
    if isinstance(forms, LinearForms):
        o, matrix = scan_states(forms, form, rows, fragments, ends=True)
        return o, RecurrentState(matrix, fragments.tokens)
    o, cache = attend(forms, form, rows, fragments, transport), keys_after(forms, form, rows, fragments)
    kept = {name: x for name, x in vars(cache).items() if isinstance(x, Tensor)}
    o, *found = together(o, *kept.values())
    reached: dict[str, Any] = dict(zip(kept, found, strict=True))
    return o, replace(cache, **reached)


def shared(forms: Any, form: str, inputs: Inputs, options: dict[str, Any], fragments: Fragments, transport: str) -> Any:
    """:func:`attend` of a form by the name, whose inputs have been checked alone."""
    if not isinstance(fragments, Fragments):
        raise TypeError(f"fragments: expected attnzoo.parallel.Fragments, got {type(fragments).__name__}")
    _check_kind(forms)
    given = forms.OPTIONS(**options)
    forms.check(*inputs, given)
    name = form if form in forms.kernels else REFERENCE
    return attend(forms, name, Rows(*inputs, given), fragments, transport)


def choose_transport(forms: Any, form: str, rows: Rows, fragments: Fragments, transport: str) -> tuple[str, str]:
    """The transport of a call, and why.

    Raises:
        UnavailableError: the one that is asked for cannot serve the call.
    """
    linear, kernel = isinstance(forms, LinearForms), form != REFERENCE
    alone = f"the {form} form takes whole sequences alone"
    if linear:  # of packed documents a closed decay is the border
        whole = kernel and len(fragments.borders) > 2 and rows.gate.log_decay is None
    else:
        whole = kernel and not isinstance(forms, AdditiveForms)
    if transport == "heads" or (transport == "auto" and whole):
        why = unshared(rows.q.shape[2], fragments.ranks)
        if why:
            raise UnavailableError(f"transport='heads': {why}{f' ({alone})' if whole else ''}")
        return "heads", alone if whole else "as asked"
    if whole:
        raise UnavailableError(f"transport={transport!r}: {alone}, expected 'heads'")
    if linear:
        return "states", "a linear side sends its states"
    prune = rows.options.prune
    if transport == "pruned" and prune is None:
        raise UnavailableError("transport='pruned': expected prune=Prune(...), without which every key is needed")
    if transport == "pruned":
        return "pruned", "as asked"
    return "gather", "as asked" if transport == "gather" else "the fastest of what was measured"


def _check_kind(forms: Any) -> None:
    if not isinstance(forms, (LinearForms, SoftmaxForms)):
        got = type(getattr(forms, "readout", forms)).__name__
        raise TypeError(f"fragments: expected a variant with a linear or a softmax readout, got {got}")


def _whole(forms: Any, form: str, rows: Rows, borders: Sequence[int]) -> Any:
    """The output of rows in each of which documents have these borders."""
    B, T = rows.q.shape[:2]
    if len(borders) == 2 or not B:
        return forms.whole(form, rows.q, rows.k, rows.v, rows.gate, rows.options)
    ends = [0, *(b * T + end for b in range(B) for end in borders[1:])]
    packed = rows.map(lambda x: x.flatten(0, 1)[None])  # one row of all documents
    options = replace(packed.options, cu_seqlens=torch.tensor(ends, device=rows.q.device))
    found = forms.whole(form, packed.q, packed.k, packed.v, packed.gate, options)
    if isinstance(found, Tensor):
        return found.unflatten(1, (B, T))[0]
    return tuple(x.unflatten(1, (B, T))[0] for x in found)


@cache
def _say(text: str) -> None:
    """Log ``text``, once per process."""
    logger.info("%s", text)
