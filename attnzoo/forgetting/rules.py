r"""Definitions of One-Pass Forgetting: a retention per key and row, learnt from the model's own later attention.

Beside any softmax variant with logits :math:`a_{tj}` and weights :math:`\alpha_{tj}` (the *teacher*) stands a
*student*, whose logits are lowered where the retention :math:`r_{tj} \in [0, 1]` of key j at row t is low:

.. math:: \tilde a_{tj} = a_{tj} + B_{tj}, \qquad B_{tj} = \log \sigma(\tau (\min_{j \le i \le t} r_{ij} - \tau_0))

A network computes r from features known at row t. Its targets are the contributions
:math:`s_{tj} = |\alpha_{tj} v_j|^2 / |y_t|^2` of the keys to the teacher's later rows.

Source: "One-Pass Forgetting: Layer-Wise Self-Distillation for Learned Memory Compression in Transformers", whose
sections are named below. The functions here are dense and follow each definition literally, for tests and for reading;
:mod:`attnzoo.forgetting.student` computes the same with memory O(T). Retention belongs to key/value heads, since a
cache can only evict a key of such a head. Shapes: a ``[B, H, T, T]``, s, S, r ``[B, G, T, T]``, both with rows first;
``exists`` ``[T, T]`` or ``[B, 1, T, T]`` bool says which rows see which keys at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from attnzoo.algebra.gate import expand_heads
from attnzoo.errors import check_kinds, unknown
from attnzoo.kernels.common.retention import DEEPEST
from attnzoo.kernels.retention.lesson import WORDS

NETWORKS = ("key", "pair", "attention", "decay")
POOLS, NORMALIZERS, DIVERGENCES = WORDS["pool"], WORDS["normalize"], WORDS["divergence"]


@dataclass(frozen=True)
class Forgetting:
    """Options of One-Pass Forgetting for a softmax layer: ``build_attention("nope", forgetting=Forgetting())``.

    Args:
        network: the inputs of retention. ``"key"``: the key, its value and its age, with which it falls; no features of
            T x T pairs, so that it scales. ``"pair"``: an MLP on every (query, key), as the paper writes it (section
            2.2). ``"attention"``: the same features, with a small dot product of the query and the key in place of the
            hidden layer (its "attention-lite module"). ``"decay"``: a rate of decay per key, ``r = exp(-rate age)``, as
            TRIM-KV has it (Bui et al., "Cache What Lasts", 2025), for comparison.
        width: hidden channels of the network.
        window: the last tokens, the row itself among them, that are always remembered (section 3's remember window; in
            training too, since a cache that protects them must be trained as one).
        threshold: tau_0, the retention at which a key is half forgotten, in (0, 1).
        temperature: tau, how sharply, above 0; used where no schedule of the training sets it.
        limit: B_max: no bias is below minus this, in (0, 60].
        blend: lambda, the student's share of the output, in [0, 1]; used where no schedule sets it.
        monotone: retention never rises again (it is replaced by its running minimum). False is for comparison: a row in
            evaluation may then see keys that earlier rows did not, and caches refuse it.
        memory: how much of the running mean of past attention to a key remains after a token, in [0, 1); only networks
            of pairs read it, and other networks refuse a value that is not the default.
        pool: how the contributions of later rows become one utility, see :func:`future_utility`.
        discount: gamma, per row of distance, in (0, 1].
        normalize: how a utility becomes a number in [0, 1], see :func:`target_retention`.
        divergence: the distance between target and retention in the loss, see :func:`divergence`.
        budget: B_t, what a row may remember: a share of its tokens below 1, or a number of tokens from 1 on.
        learned_budget: learn how the key heads of a layer divide ``budget``.
        shared_budget: the key heads of all layers have one budget together, ``budget`` for each of them on average,
            which they divide freely; else each head has its own.

    Raises:
        ValueError: a number out of range or an unknown word.
    """

    network: str = "key"
    width: int = 32
    window: int = 16
    threshold: float = 0.5
    temperature: float = 64.0
    limit: float = 30.0
    blend: float = 1.0
    monotone: bool = True
    memory: float = 0.9
    pool: str = "power"
    discount: float = 1.0
    normalize: str = "mean"
    divergence: str = "bernoulli"
    budget: float = 0.5
    learned_budget: bool = False
    shared_budget: bool = False

    def __post_init__(self) -> None:
        for name, words in (
            ("network", NETWORKS), ("pool", POOLS), ("normalize", NORMALIZERS), ("divergence", DIVERGENCES)
        ):  # fmt: skip
            if getattr(self, name) not in words:
                raise unknown(f"forgetting.{name}", getattr(self, name), words)
        check_kinds(vars(self), Forgetting.__annotations__)
        for name, fits, expected in (
            ("width", self.width >= 1, "at least 1"),
            ("window", self.window >= 1, "at least 1 (the row itself)"),
            ("threshold", 0 < self.threshold < 1, "a number in (0, 1)"),
            ("temperature", 0 < self.temperature < float("inf"), "a number above 0"),
            ("limit", 0 < self.limit <= DEEPEST, f"a number in (0, {DEEPEST:g}]"),
            ("blend", 0 <= self.blend <= 1, "a number in [0, 1]"),
            ("memory", 0 <= self.memory < 1, "a number in [0, 1)"),
            ("discount", 0 < self.discount <= 1, "a number in (0, 1]"),
            ("budget", self.budget > 0, "a share or a number of tokens above 0"),
        ):
            if not fits:
                raise ValueError(f"forgetting.{name}: expected {expected}, got {getattr(self, name)!r}")
        if self.memory != Forgetting.memory and not self.of_pairs:
            what = f"{Forgetting.memory} with network={self.network!r} ('pair' and 'attention' read it)"
            raise ValueError(f"forgetting.memory: expected {what}, got {self.memory!r}")
        if self.learned_budget and self.shared_budget:
            raise ValueError("forgetting.learned_budget: expected False with shared_budget (heads divide it freely)")

    @property
    def of_pairs(self) -> bool:
        """Whether the network looks at (query, key) pairs."""
        return self.network in ("pair", "attention")

    def capacity(self, tokens: Tensor) -> Tensor:
        """B_t, the budget in tokens, of rows that see ``tokens`` tokens."""
        return tokens * self.budget if self.budget < 1 else tokens.clamp(max=self.budget)


def parse_budget(budget: int | str | None) -> tuple[int | None, int | None, bool]:
    """The tokens per key head and the bytes that a user's ``budget`` allows, one of which is None, and whether the
    bytes are those of all layers.

    A budget is a number of tokens for each key head, or a text such as "96 KiB" for the keys and values of all heads of
    a layer and one sequence together, or "2 MiB total" for those of all layers.

    Raises:
        ValueError: none of these.
    """
    if budget is None:
        return None, None, False
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1:
        return budget, None, False
    found = re.fullmatch(r"\s*(\d+)\s*(B|KiB|MiB|GiB)(\s+total)?\s*", budget) if isinstance(budget, str) else None
    size = 0 if found is None else int(found[1]) << {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[found[2]]
    if found is None or not 0 < size < 1 << 63:  # sums of bytes are int64
        how = "a number of tokens or a text such as '96 KiB' or '2 MiB total'"
        raise ValueError(f"budget: expected {how}, got {budget!r}")
    return None, size, found[3] is not None


def contributions(weights: Tensor, v: Tensor) -> Tensor:
    r"""Section 2.1: :math:`s_{tj} = |u_{tj}|^2 / |y_t|^2`, with :math:`u_{tj} = \alpha_{tj} v_j` and y their sum.

    The text writes a ratio of two vectors. The ratio of their lengths is the reading that does not depend on the basis
    of the values and is finite where one channel of y is 0. Over the query heads that share a key, u and y are
    concatenated: one key serves them all.

    Args:
        weights: alpha ``[B, H, T, T]``.
        v: ``[B, T, G, V]``.

    Returns:
        ``[B, G, T, T]``, >= 0; above 1 where values cancel.
    """
    G, H = v.shape[2], weights.shape[1]
    values = rearrange(expand_heads(v, H), "b j h v -> b h 1 j v")
    u = weights[..., None] * values
    squared = u.square().sum(-1), u.sum(3).square().sum(-1)
    up, low = (reduce(x, "b (g r) ... -> b g ...", "sum", g=G) for x in squared)
    return up / least(low)[..., None]


def least(x: Tensor) -> Tensor:
    """x >= 0 raised to a least positive number, so that division and the logarithm are finite."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def future_utility(s: Tensor, exists: Tensor, options: Forgetting, temperature: float) -> Tensor:
    r"""Section 2.1: :math:`S_{tj}`, the contributions :math:`x_i = \gamma^{i-t} s_{ij}` of the rows i >= t, pooled.

    ``"softmax"`` is :math:`\sum_i w_i x_i` with :math:`w = \mathrm{softmax}(\tau x)`, the plain reading of the text's
    *softmaxpool*; ``"max"`` is the largest. Where attention is spread, contributions are about :math:`1 / T^2`
    (:math:`1 / T` if the values are independent), and the former is nearly a plain mean for :math:`\tau` far below T.
    ``"power"``, the default, has :math:`w = \mathrm{softmax}(\tau \log x)`: a temperature that means the same at every
    length.

    Args:
        s: ``[B, G, T, T]``.

    Returns:
        ``[B, G, T, T]``, between the mean and the largest of the discounted contributions; 0 where no row sees the key.
    """
    T, pooled = s.shape[-1], torch.zeros_like(s)
    exists = exists.expand(s.shape)
    for t in range(T):
        age = torch.arange(T - t, dtype=s.dtype, device=s.device)[:, None]
        x = options.discount**age * s[..., t:, :]  # [B, G, T - t, T]
        if options.pool == "max":
            pooled[..., t, :] = x.masked_fill(~exists[..., t:, :], 0.0).amax(-2)
            continue
        logits = temperature * (least(x).log() if options.pool == "power" else x)
        w = logits.masked_fill(~exists[..., t:, :], -torch.inf).softmax(-2)
        pooled[..., t, :] = (w * x).sum(-2)
    return pooled.nan_to_num(0.0).masked_fill(~exists, 0.0)


def target_retention(utility: Tensor, exists: Tensor, normalize: str) -> Tensor:
    """Section 2.4's "normalized future utilities", ``[B, G, T, T]`` in [0, 1].

    ``"mean"``: ``S / (S + mean of the row's S)``, 1/2 for a key as useful as the average one that the row sees;
    ``"max"``: ``S / max``. Both leave the order of a row's keys and do not depend on the unit of S, which the text
    leaves open (a sum would make a row's retentions compete, and their number a constant 1 whatever the budget is).
    """
    utility = utility.masked_fill(~exists, 0.0)
    if normalize == "max":
        return utility / least(utility.amax(-1, keepdim=True))
    mean = utility.sum(-1, keepdim=True) / exists.sum(-1, keepdim=True).clamp(min=1)
    return utility / least(utility + mean)


def squashed(logits: Tensor) -> Tensor:
    """Section 2.2's attention logits, as a feature in (-1, 1) with the finest resolution around 0:
    ``a / (8 + |a|)``."""
    a = logits.clamp(min=-1e4)
    return a / (8 + a.abs())


def shares(logits: Tensor, heads: int) -> Tensor:
    r"""Section 2.2's attention to a key, as a feature: :math:`\sigma(a_{tj} - a_{tt})`, mean over the group's heads.

    The row's weight on key j in a softmax over j and the row's own key alone. A weight among all keys would depend on
    which keys a cache has evicted; this one is the same in training and with any cache.

    Args:
        logits: ``[B, H, T, T]``.
        heads: G.

    Returns:
        ``[B, G, T, T]``, 1/2 on the diagonal.
    """
    own = logits.diagonal(dim1=-2, dim2=-1)[..., None]
    return reduce((logits - own).sigmoid(), "b (g r) t j -> b g t j", "mean", g=heads)


def running_mean(shares: Tensor, memory: float) -> Tensor:
    """Section 2.2's EMA of past attention to j, of :func:`shares` x: ``m_jj = x_jj``, and then
    ``m_tj = memory m_{t-1,j} + (1 - memory) x_tj``; 0 above the diagonal."""
    rows = [torch.zeros_like(shares[..., 0, :])]
    first = torch.eye(shares.shape[-1], dtype=torch.bool, device=shares.device)
    for t in range(shares.shape[-2]):
        x = shares[..., t, :]
        rows.append(torch.where(first[t], x, memory * rows[-1] + (1 - memory) * x))
    return torch.stack(rows[1:], -2).tril()


def remembered(retention: Tensor, age: Tensor, options: Forgetting) -> Tensor:
    """The effective retention: 1 for the last ``window`` tokens, then the minimum of r so far.

    That is section 2.2's cumulative minimum along time, "no un-forgetting".

    Args:
        retention: r ``[B, G, T, T]``.
        age: ``t - j``, ``[T, T]`` or ``[B, 1, T, T]``; negative above the diagonal.
    """
    kept = torch.where(age < options.window, 1.0, retention)
    return kept.cummin(-2).values if options.monotone else kept


def forgetful_bias(retention: Tensor, options: Forgetting, temperature: float) -> Tensor:
    r"""Section 2.2: :math:`B = \log \sigma(\tau (r - \tau_0))`, clipped to :math:`[-B_{max}, 0]`."""
    return F.logsigmoid(temperature * (retention - options.threshold)).clamp(min=-options.limit)


def full_bias(options: Forgetting, temperature: float) -> float:
    """The bias of a key with retention r = 1; it is also the bias of the sinks."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return 0.0 if math.isinf(temperature) else float(forgetful_bias(one, options, temperature))


def student(logits: Tensor, bias: Tensor, v: Tensor, sink: Tensor | None = None, sink_bias: float = 0.0) -> Tensor:
    """Section 2.2: the softmax readout of ``a + B``; it equals the teacher where r = 1 everywhere.

    Args:
        logits: a ``[B, H, T, T]``, -inf where a row sees nothing.
        bias: B ``[B, G, T, T]``.
        v: ``[B, T, G, V]``.
        sink: ``[H]`` or None, one more logit per head without a value.

    Returns:
        ``[B, T, H, V]``.
    """
    H, T = logits.shape[1:3]
    masked = logits + bias.repeat_interleave(H // bias.shape[1], 1)
    if sink is not None:
        more = (sink + sink_bias).to(masked.dtype)[:, None, None].expand(*masked.shape[:-1], 1)
        masked = torch.cat([masked, more], -1)
    return torch.einsum("bhtj,bjhv->bthv", masked.softmax(-1)[..., :T], expand_heads(v, H))


def blended(teacher: Tensor, student: Tensor, blend: float) -> Tensor:
    """Section 2.3: ``(1 - lambda) y + lambda y_f``, with gradients through the student alone (section 2.4).

    Args:
        teacher, student: outputs ``[B, T, H, V]``.
    """
    return student if blend == 1 else (1 - blend) * teacher.detach() + blend * student


def divergence(target: Tensor, logits: Tensor, kind: str) -> Tensor:
    """Section 2.4's L_r for each pair, >= 0, and 0 only where retention equals the target; no gradient flows to the
    target.

    The text asks for KL or MSE between numbers that are no distributions. ``"bernoulli"``: the KL divergence of two
    Bernoulli distributions with these probabilities. ``"mse"``: the squared difference.

    Args:
        target: in [0, 1].
        logits: of the retention, ``r = sigmoid(logits)``.
    """
    target = target.detach()
    if kind == "mse":
        return (logits.sigmoid() - target).square()
    crossed = (1 - target) * logits - F.logsigmoid(logits)
    found: Tensor = crossed - torch.special.entr(target) - torch.special.entr(1 - target)
    return found


def distillation_loss(target: Tensor, logits: Tensor, exists: Tensor, age: Tensor, options: Forgetting) -> Tensor:
    """Section 2.4's L_r: the mean of :func:`divergence` over the pairs that are not in the remember window.

    Args:
        target, logits: as in :func:`divergence`, ``[B, G, T, T]``.
        exists, age: the mask of visible pairs, and the distance from key to row in tokens; both broadcast to
            ``target``.
    """
    counts = (exists & (age >= options.window)).expand(target.shape)
    each = divergence(target, logits, options.divergence).masked_fill(~counts, 0.0)
    return each.sum() / counts.sum().clamp(min=1)


def expected_kept(retention: Tensor, options: Forgetting, temperature: float) -> Tensor:
    r"""Section 2.4: the probability :math:`\sigma(\tau (r - \tau_0))` that a key with this retention is still held."""
    return (temperature * (retention - options.threshold)).sigmoid()


def budget_loss(
    retention: Tensor, exists: Tensor, options: Forgetting, temperature: float, shares: Tensor | None = None
) -> Tensor:
    r"""Section 2.4's L_b: :math:`|\sum_j \sigma(\tau (r_{tj} - \tau_0)) - B_t|`, divided by the row's number of tokens,
    mean over rows.

    The paper does not divide; the division gives rows of every length the same weight.

    Args:
        retention: :func:`remembered`, ``[B, G, T, T]``.
        shares: each key head's share of the layer's budget, ``[G]`` with mean 1; None for equal shares.
    """
    exists = exists.expand(retention.shape)
    kept = expected_kept(retention, options, temperature).masked_fill(~exists, 0.0).sum(-1)  # [B, G, T]
    return excess(kept, exists.sum(-1), options, shares).abs().sum()


def excess(kept: Tensor, tokens: Tensor, options: Forgetting, shares: Tensor | None) -> Tensor:
    """What each row holds beyond its budget (below 0: less) as a share of its tokens, divided by the number of all rows
    ``[B, G, T]``; from the expected number of retained keys and the number of all keys, both ``[B, G, T]``."""
    wanted = options.capacity(tokens.to(kept.dtype))
    if shares is not None:
        wanted = (wanted * shares[:, None]).minimum(tokens.to(kept.dtype))
    rows = tokens > 0
    over = ((kept - wanted) / tokens.clamp(min=1)).masked_fill(~rows, 0.0)
    return over / rows.sum().clamp(min=1)


def shared_gap(layers: Sequence[Tensor]) -> Tensor:
    """L_b of a budget that all heads of several layers share: the mean over rows of the absolute value of the mean
    excess of their heads.

    Args:
        layers: the :func:`excess` of each layer, ``[B, G, T]``.
    """
    heads = sum(one.shape[1] for one in layers)
    total = torch.stack([one.sum(1) * one.shape[1] for one in layers]).sum(0)  # [B, T]
    return total.abs().sum() / heads
