"""The gate: the transition ``A_t = exp(g_t) R_t`` of every variant, in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gate:
    r"""The transition of each token, as the parts a variant needs.

    The scalar part is :math:`g_t` = ``log_decay``. The matrix part is the product, in this order,

    .. math:: R_t = \mathrm{Diag}(e^{a_t})\; \mathrm{Rot}(\theta_t)\; (I - \beta_t w_t w_t^\top)

    of the parts that are given (a missing part is the identity). ``Rot`` turns the coordinate
    pairs (2i, 2i+1) by the angle ``theta[i]``, as RoPE does (Su et al., 2021, eq. 15).

    Args:
        log_decay: g, natural log, <= 0 (-inf closes the gate), ``[B, T, H]``.
        log_diag: a, natural log per channel, <= 0, ``[B, T, H, K]``.
        angle: theta in radians per token, ``[K/2]`` (every token, every head), ``[B, T, 1, K/2]`` (every head) or
            ``[B, T, H, K/2]``.
        w: unit vectors of the Householder-like factor, ``[B, T, G, K]``.
        beta: its strength in [0, 2], ``[B, T, G]``.
    """

    log_decay: Tensor | None = None
    log_diag: Tensor | None = None
    angle: Tensor | None = None
    w: Tensor | None = None
    beta: Tensor | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are given."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Gate:
        """Apply ``fn`` to every part that is given."""
        return replace(self, **{name: fn(getattr(self, name)) for name in self.parts})

    def slice(self, start: int, stop: int) -> Gate:
        """The gate of tokens ``start`` to ``stop`` (a time-invariant angle stays as it is)."""
        return self.map(lambda part: part if part.ndim == 1 else part[:, start:stop])

    def neutral_where(self, absent: Tensor) -> Gate:
        """The gate with an identity transition at the tokens where ``absent`` ``[B, T]`` is true.

        The angle must be per token (a time-invariant one is expanded by :meth:`per_token`).
        """
        return self.map(lambda part: part.masked_fill(_unsqueeze_to(absent, part.ndim), 0.0))

    def per_token(self, q: Tensor) -> Gate:
        """Expand a time-invariant angle to ``[B, T, 1, K/2]``, with q ``[B, T, H, K]``."""
        if self.angle is None or self.angle.ndim != 1:
            return self
        return replace(self, angle=self.angle.expand(*q.shape[:2], 1, -1))

    def dense(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The gate as explicit float64 matrices, the ground of every test.

        Args:
            q: queries ``[B, T, H, K]``; only their shape and device are used.

        Returns:
            g ``[B, T, H]`` and R ``[B, T, H, K, K]``, float64.
        """
        B, T, H, K = q.shape
        g = q.new_zeros(B, T, H, dtype=torch.float64)
        if self.log_decay is not None:
            g = self.log_decay.double()
        R = torch.eye(K, dtype=torch.float64, device=q.device).expand(B, T, H, K, K)
        if self.log_diag is not None:
            R = R * self.log_diag.double().exp()[..., :, None]
        if self.angle is not None:
            angle = self.angle.double().expand(B, T, H, K // 2)
            R = R @ torch.diag_embed(angle.cos().repeat_interleave(2, -1)).add(
                torch.diag_embed(_every_second(-angle.sin()), 1)
            ).add(torch.diag_embed(_every_second(angle.sin()), -1))
        if self.w is not None and self.beta is not None:
            w, beta = expand_heads(self.w.double(), H), expand_heads(self.beta.double(), H)
            eye = torch.eye(K, dtype=torch.float64, device=q.device)
            R = R @ (eye - beta[..., None, None] * w[..., :, None] * w[..., None, :])
        return g, R


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads of ``[B, T, G, ...]`` up to ``heads``, if there are fewer."""
    return x if x.shape[2] >= heads else x.repeat_interleave(heads // x.shape[2], 2)


def _every_second(x: Tensor) -> Tensor:
    """Interleave the entries of ``x`` with zeros, without a zero at the end: an off-diagonal of length K-1."""
    return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., :-1]


def _unsqueeze_to(mask: Tensor, ndim: int) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (ndim - mask.ndim))
