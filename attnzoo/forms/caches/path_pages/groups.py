"""Keys that transitions carry, in groups of pages: the form that a GPU's generator reads and steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.forms.caches.pages.page_table import CHUNK, PoolSizes
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool, longest, pool_of
from attnzoo.forms.caches.path_pages.pool import CarriedPool, path_tokens, step_pool
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.kernels.common.untraced import untraced
from attnzoo.kernels.decode.path_state import OpenGroup, PathGroups, PathTokens

GROUP = 8  # pages


@dataclass(eq=False, kw_only=True)
class GroupedPool(KeyPool):
    """A pool whose keys stand as the last token of their group of pages left them; see ``attnzoo.kernels.decode``.

    Pages of whole groups are in the dtype of the values, and were rounded once; those of the group that is not whole
    hold its keys as they came. Sequences share no pages, and take back only tokens that no :meth:`step` has carried.

    Args:
        open_keys: keys of the group that is not whole, as its last token left them, ``[B, G, GROUP PAGE, K]`` float32.
        open_factor: transposed product of its factors, ``[B, G, K, K]`` float32; any where it is empty.
        factors: those of whole groups, ``[B, G, M, K, K]`` float32.
        base: how many of the first groups have none: their keys stand as one later token left them all, ``[B]`` int32.
    """

    group: ClassVar[int] = GROUP
    shares: ClassVar[bool] = False

    open_keys: Tensor
    open_factor: Tensor
    factors: Tensor
    base: Tensor

    @classmethod
    def empty(
        cls, sizes: PoolSizes, *, dtype: torch.dtype, device: torch.device | str = "cpu", decays: bool = True,
        pages: int = 0, tokens: int = 0, group: int = GROUP, **more: Any,
    ) -> Self:  # fmt: skip
        """A pool of empty sequences of up to ``tokens`` tokens, ``group`` pages a group; see :meth:`Pages.empty`."""
        B, G, _, K, _ = sizes
        groups = -(-max(CHUNK, -(-tokens // PAGE)) // group)
        return super().empty(
            sizes, dtype=dtype, device=device, decays=decays, pages=pages, tokens=tokens,
            **_opened(B, G, K, device, group), factors=torch.zeros(B, G, groups, K, K, device=device), **more,
        )  # fmt: skip

    def add(self, k: Tensor, v: Tensor, gate: Gate, valid: Tensor | None) -> None:
        """Nothing: only the kernels of :meth:`step` add tokens to groups of pages.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("add: expected a pool whose pages stand alone, got groups of pages")

    def holding(self, state: Any) -> GroupedPool:
        keys, group = None if state.in_pages else state.k[0], self.open_keys.shape[2] // PAGE
        return self.copy_of(pool_of(state), keys, group)

    @classmethod
    @torch.no_grad()
    def copy_of(cls, pool: KeyPool, keys: Tensor | None = None, group: int = GROUP) -> Self:
        """The only sequence of ``pool``, all of whose keys stand as its last token has left them.

        Args:
            keys: all of them, ``[S, G, K]``; None: those of a
                :class:`~attnzoo.forms.caches.path_pages.pool.CarriedPool`.
            group: pages of a group.
        """
        S, G, K = pool.lengths[0], pool.table.shape[1], pool.k.shape[2]
        ids, n = pool.table[0, :, : -(-S // PAGE)], -(-S // PAGE)
        live, at = ids >= 0, ids.clamp(min=0).long()
        if keys is None:
            pages = pool.k[at].float() @ later_factors(cast(CarriedPool, pool).factor[at].float()).mT
        else:
            padded = torch.nn.functional.pad(keys.float(), (0, 0, 0, 0, 0, n * PAGE - S))
            pages = padded.transpose(0, 1).unflatten(1, (n, PAGE))  # [G, n, PAGE, K]
        there = torch.arange(n * PAGE, device=pages.device).view(n, PAGE, 1) < S
        pages = pages.masked_fill(~(there & live[..., None, None]), 0.0)
        opened, start = _opened(1, G, K, pages.device, group), S // (group * PAGE) * group
        opened["base"].fill_(start // group)
        opened["open_keys"][0, :, : (n - start) * PAGE] = pages[:, start:].flatten(1, 2)
        rounded, k, norms = pages.to(pool.v.dtype), pool.v.new_zeros(pool.k.shape), pool.k_norm.clone()
        k[at[live]] = rounded[live]
        norms[0, :, :n] = norms[0, :, :n].maximum(longest(pages).maximum(longest(rounded)).amax(-1))
        kept: dict[str, Any] = {f.name: getattr(pool, f.name) for f in fields(KeyPool)} | {"k": k, "k_norm": norms}
        return cls(**kept, **cast(dict[str, Any], opened), factors=pages.new_empty(1, G, 0, K, K))

    @untraced  # its kernels write to the pool where it stands
    def step(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Gate, given: SoftmaxOptions, count: Tensor | None = None,
        impl: Literal["triton", "reference"] = "triton", carry: bool = True,
    ) -> Tensor:  # fmt: skip
        """As :meth:`KeyPool.step`, always in kernels."""
        tokens = path_tokens(k.to(self.k.dtype), gate, count)
        return step_pool(self, q, v, tokens, self._groups, given, carry)

    def keep(self, call: Call | None, kept: Tensor, length: Tensor) -> None:
        assert call is not None
        self.crop_sums(length.int())
        self.carry(call.k, call.gate.per_token(call.q), kept)

    def carry(self, k: Tensor, gate: Gate, kept: Tensor) -> None:
        """Carry keys over the first ``kept[b]`` tokens of a step that did not; the lengths count them."""
        from attnzoo.kernels.decode import paged_path_carry

        T = k.shape[1]
        order = (torch.arange(T, device=k.device) - (T - kept[:, None])).clamp(min=0)  # these tokens last

        def last(x: Tensor) -> Tensor:
            return x.gather(1, order.view(*order.shape, *(1,) * (x.ndim - 2)).expand_as(x))

        w, beta = last(cast(Tensor, gate.w)), last(cast(Tensor, gate.beta))
        tokens = PathTokens(last(k.to(self.k.dtype)), w, beta, counts=kept.int())
        paged_path_carry(tokens, self.state(), self._groups)

    @torch.no_grad()
    def crop_sums(self, length: Tensor) -> None:
        """Crop the sums of gates as :meth:`KeyPool.crop_sums`; a page's bound of its longest key does not shrink."""
        norms = self.k_norm.clone()
        super().crop_sums(length)
        self.k_norm.copy_(torch.where(self.k_norm > 0, norms.maximum(self.k_norm), 0.0))

    @property
    def _groups(self) -> PathGroups:
        return PathGroups(self.factors, OpenGroup(self.open_keys, self.open_factor, self.base))

    @torch.no_grad()
    def adopt(self, row: int, other: Any, tokens: int, twin: int | None = None) -> None:
        """As :meth:`Pages.adopt`, of what :meth:`copy_of` gives, which has no products yet."""
        other.factors = self.factors[row : row + 1]
        super().adopt(row, other, tokens, twin)


def _opened(B: int, G: int, K: int, device: torch.device | str, group: int) -> dict[str, Tensor]:
    """No group begun."""
    return {
        "open_keys": torch.zeros(B, G, group * PAGE, K, device=device),
        "open_factor": torch.eye(K, device=device).repeat(B, G, 1, 1),
        "base": torch.zeros(B, dtype=torch.int32, device=device),
    }


def later_factors(factor: Tensor) -> Tensor:
    """Products ``[G, n, K, K]`` that take rows from the end of the last page to that of each page.

    Args:
        factor: that of each page, which takes rows from its end to that of the page before, ``[G, n, K, K]``.
    """
    last = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor[:, :1])
    product, reach = torch.cat([factor[:, 1:], last], 1), 1
    while reach < product.shape[1]:  # each is that over the next ``reach`` pages
        product = torch.cat([product[:, reach:] @ product[:, :-reach], product[:, -reach:]], 1)
        reach *= 2
    return product
