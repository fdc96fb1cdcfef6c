"""The float64 oracle: recurrence, scores and readouts written out as explicit products.

Nothing here is fast. Every form of every variant is tested against these functions, and ``attnzoo verify`` runs them.
They multiply the matrices that a ``transition`` says (:meth:`~attnzoo.algebra.transitions.Transition.matrix`), or, with
None, the factors of the gate's parts (:meth:`attnzoo.Gate.dense`); a set of parts that the library knows has both.
Shapes: q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]``, outputs ``[B, T, H, V]`` in float64.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.readout import Readout, Scores
from attnzoo.algebra.transitions import HeadGate, Transition


def default_scale(q: Tensor) -> float:
    """``1 / sqrt(K)``."""
    return float(q.shape[-1] ** -0.5)


def matrices(q: Tensor, gate: Gate, transition: Transition | None = None) -> tuple[Tensor, Tensor]:
    """The log-decay g ``[B, T, H]`` and R ``[B, T, H, K, K]`` in float64, of a ``transition`` or (None) of the gate's
    parts."""
    if transition is None:
        return gate.dense(q)
    wide = q.double()
    return gate.decay(q), transition.matrix(HeadGate.of(gate, wide), wide.transpose(1, 2)).transpose(1, 2)


def scores(
    q: Tensor, k: Tensor, gate: Gate, *, scale: float | None = None, transition: Transition | None = None
) -> tuple[Tensor, Tensor]:
    """The score s and the log-decay d between every query and every earlier key.

    Returns:
        s ``[B, H, T, T]`` with ``s_tj = scale k_j^T R_{j+1} ... R_t q_t``, and d ``[B, H, T, T]`` with
        ``d_tj = g_{j+1} + ... + g_t``; above the diagonal s = 0 and d = -inf.
    """
    B, T, H, _ = q.shape
    g, R = matrices(q, gate, transition)
    q64 = q.double() * (default_scale(q) if scale is None else scale)
    k64 = expand_heads(k.double(), H)
    rows_s, rows_d = [], []
    keys = k64[:, :0]  # keys 0..t-1, each already multiplied by the transitions after it
    past = g[:, :0]  # the log-decay from each of them to the present
    for t in range(T):
        keys = torch.cat([einsum(R[:, t], keys, "b h k l, b j h k -> b j h l"), k64[:, t : t + 1]], 1)
        past = torch.cat([past + g[:, t : t + 1], torch.zeros_like(g[:, :1])], 1)
        s = einsum(keys, q64[:, t], "b j h k, b h k -> b h j")
        rows_s.append(torch.nn.functional.pad(s, (0, T - 1 - t)))
        rows_d.append(torch.nn.functional.pad(rearrange(past, "b j h -> b h j"), (0, T - 1 - t), value=-torch.inf))
    return torch.stack(rows_s, 2), torch.stack(rows_d, 2)


def linear(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, write: Tensor | None = None,
    delta_rule: bool = False, transition: Transition | None = None,
) -> Tensor:  # fmt: skip
    """``o_t = sum_j s_tj exp(d_tj) write_j v_j``; the write strength is 1, or beta with ``delta_rule``.

    Args:
        write: ``[B, T, G]`` or ``[B, T, H]``, or None.
    """
    H = q.shape[2]
    s, d = scores(q, k, gate, scale=scale, transition=transition)
    write = gate.beta if delta_rule else write
    v = expand_heads(v.double(), H)
    v = v if write is None else v * expand_heads(write.double(), H)[..., None]
    return einsum(s * d.exp(), v, "b h t j, b j h v -> b t h v")


def softmax(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, window: int | None = None,
    sink: Tensor | None = None, return_lse: bool = False, softcap: float | None = None,
    transition: Transition | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``o_t = sum_j softmax_j(s_tj + d_tj) v_j``.

    Args:
        window: the sum is over ``t - window < j <= t``.
        sink: ``[H]``, one more logit per head, which has no value.
        return_lse: also return each row's log-sum-exp ``[B, T, H]``, with the sink's logit in the sum.
        softcap: ``softcap tanh(s_tj / softcap)`` takes the place of ``s_tj``.
    """
    T = q.shape[1]
    s, d = scores(q, k, gate, scale=scale, transition=transition)
    logits = (s if softcap is None else softcap * (s / softcap).tanh()) + d
    if window is not None:
        logits = logits.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).tril(-window), -torch.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.double()[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    weights, v = logits.softmax(-1)[..., :T], expand_heads(v.double(), q.shape[2])
    o = einsum(weights, v, "b h t j, b j h v -> b t h v")
    return (o, rearrange(logits.logsumexp(-1), "b h t -> b t h")) if return_lse else o


def weighed(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, readout: Readout, scale: float | None = None,
    write: Tensor | None = None, delta_rule: bool = False, transition: Transition | None = None,
) -> Tensor:  # fmt: skip
    """The ``output`` of a readout's weights p, ``o_t = sum_j p_tj write_j v_j``; the other arguments are those of
    :func:`linear`."""
    T, H = q.shape[1:3]
    scale = default_scale(q) if scale is None else scale
    q, k = readout.features(q.double(), k.double())
    s, d = scores(q, k, gate, scale=scale, transition=transition)
    if not readout.causal:
        s = einsum(expand_heads(k, H), q * scale, "b j h k, b t h k -> b h t j")
        h = Gate(log_decay=gate.log_decay_back).decay(q).transpose(1, 2)  # [B, H, T]
        rows = [torch.cat([d[:, :, t, : t + 1], h[..., t : T - 1].cumsum(-1)], -1) for t in range(T)]
        d = torch.stack(rows, 2)
    s = s.masked_fill(d == -torch.inf, 0.0)
    local = HeadGate.of(gate, q)
    p = readout.weights(Scores(s, d, torch.arange(T, device=q.device)[None], local))
    write, v = gate.beta if delta_rule else write, expand_heads(v.double(), H)
    v = v if write is None else v * expand_heads(write.double(), H)[..., None]
    return rearrange(readout.output(p, rearrange(v, "b j h v -> b h j v")), "b h t v -> b t h v")


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None, state: Tensor | None = None,
    transition: Transition | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``S_t = S_{t-1} A_t + v_t k_t^T``, ``o_t = S_t (scale q_t)``, with the state as ``S^T`` ``[B, H, K, V]``.

    Returns:
        o ``[B, T, H, V]`` and the state after the last token ``[B, H, K, V]``.
    """
    B, T, H, K = q.shape
    g, R = matrices(q, gate, transition)
    A = g.exp()[..., None, None] * R
    q64 = q.double() * (default_scale(q) if scale is None else scale)
    k64, v64 = expand_heads(k.double(), H), expand_heads(v.double(), H)
    S = q64.new_zeros(B, H, K, v.shape[-1]) if state is None else state.double()
    outputs = []
    for t in range(T):
        S = A[:, t].mT @ S + k64[:, t, :, :, None] * v64[:, t, :, None, :]
        outputs.append(einsum(S, q64[:, t], "b h k v, b h k -> b h v"))
    return torch.stack(outputs, 1), S
