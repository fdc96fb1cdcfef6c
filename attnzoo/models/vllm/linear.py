"""The core of the linear side over states in the engine's pages."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.protocol import Call
from attnzoo.layer.dispatch import chosen, run
from attnzoo.models.vllm.storage import MATRIX
from attnzoo.models.vllm.stream import ServedStream
from attnzoo.registry.variant import Variant


def recur(stream: ServedStream, variant: Variant, impl: str, call: Call, keys_per_token: int) -> Tensor:
    """The output ``[1, N, H, V]`` of a step's requests, each of which continues its state.

    Requests of similar length run together as padded rows, so that steps of one token are one call of the form that
    the variant has for them, and pieces of prompts are others.

    Args:
        stream: the rows of the step.
        variant: of the linear side.
        impl: how the form is chosen, as in :func:`~attnzoo.layer.build.build_attention`.
        call: of all N tokens, packed.
        keys_per_token: sub-tokens of each token, which N counts.
    """
    if stream.step is None:
        whole: Tensor = run(variant, chosen(variant, impl, call), call, checked=False)[0]
        return whole
    out = call.v.new_zeros(call.q.shape[1], call.q.shape[2], call.v.shape[3])
    matrices = stream.read(MATRIX)
    ends = matrices.clone()
    for rows in stream.step.rows(keys_per_token):
        options, sequences = rows.pick_options(call.options), rows.sequences[:, 0]
        if not bool(rows.there.all()):
            options = replace(options, valid=rows.there)
        state = RecurrentState(matrices[sequences], disposable=True)
        q, k, v = (rows.pick(x) for x in (call.q, call.k, call.v))
        local = Call(q, k, v, rows.pick_gate(call.gate), state, True, options)
        o, after = run(variant, chosen(variant, impl, local), local, checked=False)
        out[rows.index[rows.there]] = o[rows.there]
        ends[sequences] = after.matrix.to(ends.dtype)
    stream.write(MATRIX, ends)
    return out[None]
