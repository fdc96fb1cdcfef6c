r"""Linear attention with complex gates of modulus one.

With K/2 complex channels, :math:`\Lambda_t = \mathrm{diag}(e^{i\theta_t})`,

.. math:: S_t = S_{t-1} \Lambda_t + v_t k_t^{*}, \qquad o_t = \mathrm{Re}(S_t q_t)

which over the reals is a rotation of each coordinate pair. Softmax dual: RoPE. Sources: Su et al., "RoFormer",
2021, eq. 15 (rotation) and section 3.3 (with linear attention); Yang et al., "PaTH Attention", 2025,
section 2, for the reading of RoPE as a product of transitions.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.sums import running_sum, sum_to_the_end
from attnzoo.algebra.transitions import ClosedForm, HeadGate, Transition, with_own_scores
from attnzoo.forms.backends.chunks import chunk_kernel, decay_chunks
from attnzoo.forms.backends.fla import Operation, Prepared, fla_kernel, scalar_decay
from attnzoo.forms.backends.rotation import turn, turn_for_cache
from attnzoo.forms.linear import LinearForms

TITLE = "Complex linear attention"
PAPER = "Su et al., 2021 (arXiv:2104.09864)"
EQUATIONS = (
    "Sₜ = Sₜ₋₁ Rot(θₜ) + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ Rot(θⱼ₊₁ + ⋯ + θₜ) qₜ) vⱼ",
)
LAYER = {"gate": "rotary", "output_norm": "rms"}


def rotate(x: Tensor, phase: Tensor) -> Tensor:
    """Rotate the channel pairs (2i, 2i+1) of ``x [..., K]`` by ``phase [..., K/2]`` radians."""
    return rotate_all(phase, x)[0]


def rotate_all(phase: Tensor, *xs: Tensor) -> list[Tensor]:
    """:func:`rotate` of tensors of one dtype by the same ``phase``."""
    sin = phase.sin()
    cos, sin = phase.cos()[..., None].to(xs[0].dtype), torch.stack([-sin, sin], -1).to(xs[0].dtype)
    pairs = (x.unflatten(-1, (-1, 2)) for x in xs)  # [..., K/2, 2]
    return [(x * cos).addcmul(x.flip(-1), sin).flatten(-2) for x in pairs]


def phases(angle: Tensor, dim: int) -> Tensor:
    """Running sum of angles in float64, so that the phase of a late token is as exact as an early one's."""
    return running_sum(angle, dim, torch.float64)


class _Rounded(torch.autograd.Function):
    """The autograd function of :func:`rotate_rounded`."""

    @staticmethod
    def forward(ctx: Any, angle: Tensor, phase: Tensor, dtype: torch.dtype, *xs: Tensor) -> Any:
        ys = [y.to(dtype) for y in rotate_all(phase, *xs)]
        ctx.save_for_backward(phase, *ys)
        ctx.dtypes = angle.dtype, xs[0].dtype
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        phase, *ys = ctx.saved_tensors
        dtype, wide = ctx.dtypes
        turn, dys = torch.zeros_like(phase), [dy.to(wide) for dy in grads]
        for y, dy in zip(ys, dys, strict=True):
            (a, b), (da, db) = (x.unflatten(-1, (-1, 2)).unbind(-1) for x in (y.to(wide), dy))
            turn += (db * a - da * b).to(phase.dtype).sum_to_size(phase.shape)
        return sum_to_the_end(turn, 1).to(dtype), None, None, *rotate_all(-phase, *dys)


def rotate_rounded(angle: Tensor, phase: Tensor, *xs: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The vectors ``xs`` rotated by each token's phase and rounded to ``dtype``, for kernels.

    The gradient of an angle is a sum over all later tokens in which large exact terms cancel and rounding errors do
    not. It is therefore computed from the rounded vectors: scores depend on differences of phases alone, so their exact
    terms still cancel.

    Args:
        angle, phase: [B or 1, T, 1 or H, K/2], the latter from ``phases``; the gradient goes to the angle.
        xs: [B, T, H, K], with as many heads as have angles, of one dtype, float32 or wider.
    """
    return cast("tuple[Tensor, ...]", _Rounded.apply(angle, phase.detach(), dtype, *xs))  # type: ignore[no-untyped-call]


def keeps_digits(angle: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel of ``dtype`` needs :func:`rotate_rounded` for the gradient of the angle."""
    return dtype.itemsize == 2 and torch.is_grad_enabled() and angle.requires_grad and angle.ndim > 1


class Rotation(Transition):
    """``R_t = Rot(angle_t)``; ``total`` is the phase turned over the block, ``[..., K/2]``."""

    parts = ("angle",)
    width = 2
    symbol = PARTS["angle"].factor

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        return self.carry(cast(Tensor, gate.angle), state)

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        phase = phases(cast(Tensor, gate.angle), dim=-2)
        turned_q = rotate(q, phase)
        return ClosedForm(
            scores=with_own_scores(turned_q @ rotate(k, phase).mT, q, k),
            q=turned_q,
            k=rotate(k, phase - phase[..., -1:, :]),
            total=phase[..., -1, :],
        )

    def carry(self, total: Tensor | None, state: Tensor) -> Tensor:
        return rotate(state.mT, -cast(Tensor, total)[..., None, :]).mT


def rotated(operation: Operation) -> Operation:
    """An operation without angles extended to gates with an angle, by rotating queries and keys first.

    Scores then depend on phase differences: ``Rot(a)^T Rot(b) = Rot(b - a)``. The w of erasing factors is rotated as
    well. A decay per channel would not commute with the rotation.
    """

    def run(x: Prepared) -> tuple[Tensor, Tensor | None]:
        q, k, phase = turned(x)
        o, state = operation(replace(x, q=q, k=k, gate=replace(x.gate, angle=None)))
        return o, None if state is None else Rotation().carry(phase[:, -1], state)

    def turned(x: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """q and k rotated by their phases since the first token, and the last token's phase."""
        angle = cast(Tensor, x.gate.angle)
        keep = turn_for_cache if x.options.get("output_final_state") else turn
        done = keep(angle, x.q, x.k, dtype=x.q.dtype)
        if done is not None:
            return done.q, done.k, done.phase
        phase = phases(cast(Tensor, x.gate.per_token(x.q).angle), dim=1)
        # closed gates leave little of an angle's gradient, and a key rounded twice may be longer than 1
        dtype = x.q.dtype if x.gate.parts == ("angle",) else torch.float32
        q, k = x.q.to(dtype), x.k.to(dtype)
        if dtype == torch.float32 and keeps_digits(angle, x.q.dtype):
            q, k = rotate_rounded(angle, phase, q, k, dtype=x.q.dtype)
        else:
            q, k = (y.to(x.q.dtype) for y in rotate_all(phase, q, k))
        return q, k, phase[:, -1:]

    return run


ROTATED_DECAY = chunk_kernel(rotated(decay_chunks), "log_decay", "angle")
FORMS = LinearForms(Rotation(), kernels={"triton": ROTATED_DECAY, "fla": fla_kernel(rotated(scalar_decay))})
