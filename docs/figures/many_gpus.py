"""A model of one text on 2 to 512 GPUs: forward + backward of FoX by times of fragments and the speed of links.

Times are milliseconds, sizes bytes, speeds GB/s in one direction. 16 heads of 128 channels with the gates of the
benches; fragments are zigzag.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from quoted import logged, run
from speeds import markdown

from attnzoo.benchmarks.measure import decay_lengths
from attnzoo.parallel import Fragments

HEADS, CHANNELS, LOG_EPS = 16, 128, -10.0
KEY = 2 * CHANNELS * 2 + 4  # bytes of a key, its value and its gate, of one head
ROW = 4 * CHANNELS * 2 + 4  # of a query, key, value, output and gate
NVLINK, NETWORK, HOST = 450.0, 50.0, 8  # of a GPU to others of its host, of it to other hosts; GPUs of a host
EXCHANGE = 0.05  # what an exchange takes without a byte: assumed
EXCHANGES = {"gather": 6, "heads": 10, "pruned": 8, "mixed": 11}
SEEN = {"computed": 1.5, "sent": 4.0}  # how far the worst of a block's, of a fragment's rows is below its own score
TOKENS, RANKS = (131072, 1048576), (2, 8, 16, 32, 128, 512)
FRAGMENTS = {  # as the log of FoX has them, in quarters of 131072 tokens: from, to
    (0, 4): ("117.8 | 32.7", "419.4 | 109.0"),
    (0, 2): ("32.7, 92.7 |", "109.0, 318.5 |"),
    (2, 4): ("92.7 | 10.5", "318.5 | 28.0"),
    (0, 1): ("10.5, 24.6", "28.0, 82.7"),
    (1, 2): ("24.6, 39.4", "82.7, 135.0"),
    (2, 3): ("39.4, 54.3", "135.0, 189.2"),
    (3, 4): ("54.3 |", "189.2 |"),
}
RECORD = "2026-11-28-h200-context"
LATER, LATEST = "2026-11-29-h200-context", "2026-11-29-h200-third-context"  # to which the model is not fitted
SHARES = "2026-11-29-h200-shares"
EXCHANGED = {  # what the record calls each transport
    ("gather", False): "gather",
    ("heads", False): "heads",
    ("gather", True): "ACP, gather",
    ("heads", True): "ACP, heads",
    ("pruned", True): "ACP, pruned, zigzag",
}
TWO = (32768, 131072)  # tokens of the record
SINCE = (
    *((tokens, "gather", pruned) for tokens in TWO for pruned in (False, True)),
    *((524288, way, True) for way in ("gather", "pruned")),
)
AIMS = {(131072, "gather", False): 1.9, (131072, "gather", True): 1.8, (32768, "gather", True): 1.4}


def measured(tokens: int, way: str, pruned: bool, of: str = "ms", record: str = RECORD) -> float:
    """A number of a record of two GPUs: `one_ms`, `ms`, `times_one`, `sent_MB`."""
    name = EXCHANGED[way, pruned]
    [found] = [row for row in run(record)["rows"] if (row["way"], row["shape"][2]) == (name, tokens)]
    return float(found[of])


def share(tokens: int, ranks: int, pruned: bool, of: str = "limit", cut: str = "zigzag") -> float:
    """A number of the record of shares: `one_ms`, `busiest` (ms), `limit`, `efficiency`."""
    where = (f"{'ACP' if pruned else 'dense'}, {cut}", tokens, ranks)
    [found] = [row for row in run(SHARES)["rows"] if (row["way"], row["shape"][2], row["ranks"]) == where]
    return float(max(found["each_ms"]) if of == "busiest" else found[of])


class Costs(NamedTuple):
    """Milliseconds per row, per pair that is computed and per key that a fragment is given, of one head."""

    row: float
    pair: float
    key: float

    def of(self, start: float, stop: float, spans: np.ndarray) -> float:
        """Milliseconds of the rows ``start`` to ``stop`` over all keys up to them, of heads with these spans."""
        pairs = float((_pairs(stop, spans) - _pairs(start, spans)).sum())
        return len(spans) * (self.row * (stop - start) + self.key * stop) + self.pair * pairs


def spans(heads: int = HEADS, channels: int = CHANNELS, seen: str = "computed", gates: int = 0) -> np.ndarray:
    """How many keys before a row each head needs, ``[heads]``, by the tail certificate with its mean gate throughout.

    With ``g = -1 / tau`` for each token, ``log n`` is that of a geometric series and ``U <= sqrt(channels)`` (normed).
    """
    tau = decay_lengths(heads, torch.Generator().manual_seed(gates)).double().numpy()
    part = 1 / 16 if seen == "sent" else 15 / 16
    return tau * (math.sqrt(channels) + SEEN[seen] - LOG_EPS - math.log(part) - np.log(-np.expm1(-1 / tau)))


def _pairs(rows: float, spans: np.ndarray) -> np.ndarray:
    """Pairs of the first ``rows`` rows, where each reads at most a head's span of keys."""
    short = np.minimum(spans, rows)
    return short * short / 2 + (rows - short) * short


def computed(pruned: bool) -> np.ndarray:
    return spans() if pruned else np.full(HEADS, np.inf)


@cache
def costs() -> Costs:
    """The costs that fit the fourteen measured fragments, by least squares of relative errors."""
    measured = [(a, b, pruned) for a, b in FRAGMENTS for pruned in (True, False)]
    times = np.array([_fragment(*each) for each in measured])
    of_each = [Costs(*one) for one in np.eye(3)]
    terms = np.array([
        [one.of(a * 32768, b * 32768, computed(pruned)) for one in of_each] for a, b, pruned in measured
    ])  # fmt: skip
    return Costs(*map(float, np.linalg.lstsq(terms / times[:, None], np.ones(len(times)), rcond=None)[0]))


def _fragment(a: int, b: int, pruned: bool) -> float:
    return logged("fox", FRAGMENTS[a, b][0 if pruned else 1])


def worst() -> float:
    """The largest relative error of the fit."""
    return max(
        abs(costs().of(a * 32768, b * 32768, computed(pruned)) / _fragment(a, b, pruned) - 1)
        for a, b in FRAGMENTS
        for pruned in (True, False)
    )


def alone(tokens: int, pruned: bool) -> float:
    """Milliseconds of one GPU."""
    return costs().of(0, tokens, computed(pruned))


def work(tokens: int, ranks: int, way: str, pruned: bool) -> float:
    """Milliseconds of the busiest rank's computation; a call takes at least what it keeps the host."""
    least, need = _least(pruned), computed(pruned)
    if way == "heads":  # dealt to and fro from the one that needs most on
        turns = np.sort(need)[::-1].reshape(-1, ranks)
        turns[1::2] = turns[1::2, ::-1]
        return max(least, *(costs().of(0, tokens, one) for one in turns.T))
    each = [0.0] * ranks
    for start, stop, rank in Fragments.zigzag(tokens, ranks).table:
        each[rank] += max(least, costs().of(start, stop, need))
    return max(each)


def _least(pruned: bool) -> float:
    return logged("fox", "1.07, 0.99 (2.68" if pruned else "0.84, 0.69 | 1.07")


@cache
def sent(tokens: int, ranks: int) -> np.ndarray:
    """Keys that the pruned transport sends, ``[ranks, ranks, heads]``: from, to."""
    table = Fragments.zigzag(tokens, ranks).table
    start, stop, rank = np.array(table).T
    gap = start[None] - stop[:, None]  # from the end of a to the start of b
    found = np.zeros((ranks, ranks, HEADS))
    for head, span in enumerate(spans(seen="sent")):
        need = np.where(gap >= 0, np.clip(span - gap, 0, (stop - start)[:, None]), 0.0)  # of the keys of a, for b
        of_rank = np.maximum(need[:, :ranks], need[:, ranks:][:, ::-1])  # for its earlier and its later fragment
        of_rank[np.arange(len(table)), rank] = 0
        found[..., head] = of_rank[:ranks] + of_rank[ranks:][::-1]
    return found


def links(tokens: int, ranks: int, way: str) -> float:
    """Milliseconds of an exchange's bytes on the links of the busiest rank, forward or backward."""
    if way == "gather":  # rings over hosts go through all network links of a host
        return _gathered(tokens * HEADS * KEY, ranks)
    if way == "ring":  # keys and values twice, their gradients once; one link goes from host to host
        speed = NVLINK if ranks <= HOST else NETWORK
        return 1.5 * tokens * HEADS * KEY * (ranks - 1) / ranks / speed / 1e6
    if way == "heads":
        one = np.full((ranks, ranks), tokens / ranks * HEADS / ranks * ROW)
        np.fill_diagonal(one, 0)
        return _direct(one)
    keys = sent(tokens, ranks)
    if way == "pruned":
        return _direct(keys.sum(-1) * KEY)
    far = keys.sum((0, 1)) > (ranks - 1) * tokens / 4  # "mixed": heads that most ranks need are gathered
    return _direct(keys[..., ~far].sum(-1) * KEY) + _gathered(tokens * int(far.sum()) * KEY, ranks)


def _gathered(size: float, ranks: int) -> float:
    speed = NVLINK if ranks <= HOST else min(NVLINK, HOST * NETWORK)
    return size * (ranks - 1) / ranks / speed / 1e6


def _direct(sizes: np.ndarray) -> float:
    """Milliseconds of the busiest link for ``sizes [ranks, ranks]``, bytes from each rank to each, both ways."""
    host = np.arange(len(sizes)) // HOST
    inside = sizes * (host[:, None] == host)
    parts = ((inside, NVLINK), (sizes - inside, NETWORK))
    return max(float(part.sum(axis).max()) / speed / 1e6 for part, speed in parts for axis in (0, 1))


def handled(tokens: int, ranks: int, way: str) -> float:
    """GB that a rank cuts, pads and joins around the exchanges: all keys, or its rows of all heads."""
    return tokens * HEADS * (ROW / ranks if way == "heads" else KEY) / 1e9


def ideal(tokens: int, ranks: int, way: str, pruned: bool) -> float:
    """Milliseconds if exchanges took their links alone, and none but a ring's were hidden."""
    if way == "ring":
        return max(work(tokens, ranks, way, pruned), 2 * links(tokens, ranks, way), ranks * _least(pruned))
    return work(tokens, ranks, way, pruned) + 2 * links(tokens, ranks, way) + EXCHANGES[way] * EXCHANGE


@cache
def handling(way: str = "gather") -> tuple[float, float]:
    """Milliseconds per GB handled and per call of a transport, from what two GPUs took beyond :func:`ideal`.

    Heads are measured without pruning alone, as the record's gates lie on other heads than the model's. Pruned keys are
    handled per GB as gathered ones are; the rest is per call.
    """
    kinds = [kind for one, kind in EXCHANGED if one == way and (way, kind) != ("heads", True)]
    known = [(tokens, pruned) for tokens in TWO for pruned in kinds]
    beyond = np.array(
        [
            measured(tokens, way, pruned)
            - ideal(tokens, 2, way, pruned) * measured(tokens, way, pruned, "one_ms") / alone(tokens, pruned)
            for tokens, pruned in known
        ]
    )  # of the machine of the record, whose one GPU may differ from the log's
    size = np.array([handled(tokens, 2, way) for tokens, _ in known])
    if way == "pruned":
        per_GB = handling()[0]
        return per_GB, float((beyond - per_GB * size).mean())
    found = np.linalg.lstsq(np.stack([size, np.ones(len(size))], 1), beyond, rcond=None)[0]
    return float(found[0]), float(found[1])


def gain(tokens: int, ranks: int, way: str, pruned: bool, *, today: bool = True) -> float:
    """How many times as fast as one GPU: with the handling of exchanges as it is today, or without any."""
    took = ideal(tokens, ranks, way, pruned)
    if today:
        per_GB, call = handling("pruned" if way == "mixed" else way)
        took += per_GB * handled(tokens, ranks, way) + call
    return alone(tokens, pruned) / took


def bound(pruned: bool) -> float:
    """How many times as fast as one GPU two are on 131072 tokens if exchanges took no time."""
    return alone(131072, pruned) / work(131072, 2, "gather", pruned)


def checked() -> str:
    """Table of the measured exchanges of two GPUs beside the model."""
    titles = ["tokens", "transport", "one GPU, ms", "two, ms", "gain", "model, links alone", "model, today's handling"]
    rows = []
    for tokens in TWO:
        for (way, pruned), name in EXCHANGED.items():
            ms = [f"{measured(tokens, way, pruned, of):g}" for of in ("one_ms", "ms")]
            known = (way, pruned) != ("heads", True)
            found = [f"{gain(tokens, 2, way, pruned, today=today):.2f}" if known else "" for today in (False, True)]
            shown = name.removesuffix(", zigzag") if pruned else f"dense, {name}"
            rows.append([f"{tokens}", shown, *ms, f"{measured(tokens, way, pruned, 'times_one'):.2f}", *found])
    return markdown(titles, rows)


def later(tokens: int, way: str, pruned: bool, of: str = "times_one") -> float:
    """A number of the second record of two GPUs."""
    return measured(tokens, way, pruned, of, LATER)


def latest(tokens: int, way: str, pruned: bool, of: str = "times_one") -> float:
    """A number of the third record of two GPUs."""
    return measured(tokens, way, pruned, of, LATEST)


def certified(tokens: int) -> float:
    """MB that two ranks send each other forward and backward by the certificate."""
    return 2 * float(sent(tokens, 2).sum()) * KEY / 1e6


def off(records: tuple[str, ...] = (LATER, LATEST)) -> float:
    """By what part the model's gains of the table are at most off those of some records."""
    known = [(gain(one[0], 2, *one[1:]), _recorded(one, record)) for one in SINCE for record in records]
    return max(abs(modelled / found - 1) for modelled, found in known if found)


def _recorded(one: tuple[int, str, bool], record: str) -> float | None:
    """The gain of a record; none where it was not measured."""
    known = {(row["way"], row["shape"][2]) for row in run(record)["rows"]}
    return measured(*one, "times_one", record) if (EXCHANGED[one[1:]], one[0]) in known else None


def since() -> str:
    """Table of the gains of two GPUs by all three records, beside what was aimed at and the model of the first."""
    days = {RECORD: "28 November", LATER: "29 November", LATEST: "later that day"}
    titles = ["tokens", "transport", *days.values(), "aimed at", "fragments allow", "model, with handling"]
    rows = []
    for tokens, way, pruned in SINCE:
        one = (tokens, way, pruned)
        cells = [_recorded(one, record) for record in days]
        cells += [AIMS.get(one), share(tokens, 2, pruned) if tokens in TWO else None, gain(tokens, 2, way, pruned)]
        shown = [f"{cell:.2f}" if cell else "" for cell in cells]
        rows.append([f"{tokens}", f"{'ACP' if pruned else 'dense'}, {way}", *shown])
    return markdown(titles, rows)


def shares() -> str:
    """Table of what the busiest of several ranks computes, measured on one GPU, beside the model."""
    titles = ["tokens", "ranks", "dense, ms", "model", "allows", "ACP, ms", "model", "allows", "contiguous allows"]
    rows = []
    for tokens in TWO:
        for ranks in (2, 4, 8):
            cells = []
            for pruned in (False, True):
                busiest, limit = (share(tokens, ranks, pruned, of) for of in ("busiest", "limit"))
                cells += [f"{busiest:g}", f"{work(tokens, ranks, 'gather', pruned):.3g}", f"{limit:.2f}"]
            rows.append([f"{tokens}", f"{ranks}", *cells, f"{share(tokens, ranks, True, cut='contiguous'):.2f}"])
    return markdown(titles, rows)


def gains(*, today: bool = True) -> str:
    """Table of how many times as fast as one GPU so many are."""
    ways = [("gather", False), ("heads", False), ("gather", True), ("heads", True), ("pruned", True), ("mixed", True)]
    if not today:
        ways.insert(1, ("ring", False))
    titles = ["tokens", "GPUs", *(f"{'ACP' if pruned else 'dense'}, {way}" for way, pruned in ways)]
    rows = []
    for tokens in TOKENS:
        for ranks in RANKS:
            served = [each for each in ways if each[0] != "heads" or ranks <= HEADS]
            found = {each: gain(tokens, ranks, *each, today=today) for each in served}
            best = [max(x for (_, kind), x in found.items() if kind == pruned) for pruned in (False, True)]
            rows.append([f"{tokens}", f"{ranks}", *(_cell(found.get(each), best[each[1]]) for each in ways)])
    return markdown(titles, rows)


def _cell(value: float | None, best: float) -> str:
    if value is None:
        return ""
    shown = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return f"**{shown}**" if value == best else shown


def exchanged() -> str:
    """Table of what the busiest rank gets of others forward, and what it takes on the links forward + backward."""
    ways = ("gather", "heads", "pruned", "mixed")
    rows = []
    for tokens in TOKENS:
        for ranks in RANKS:
            served = [way for way in ways if way != "heads" or ranks <= HEADS]
            ms = {way: f"{2 * links(tokens, ranks, way):.3g}" for way in served}
            share = sent(tokens, ranks).sum((0, 2)).max() / (tokens * HEADS * (ranks - 1) / ranks)
            rows.append([f"{tokens}", f"{ranks}", f"{100 * share:.0f}%", *(ms.get(way, "") for way in ways)])
    return markdown(["tokens", "GPUs", "keys, pruned", *(f"{way}, ms" for way in ways)], rows)


TABLES = {
    "two GPUs": checked,
    "two GPUs since": since,
    "shares of ranks": shares,
    "gains today": gains,
    "gains of links": partial(gains, today=False),
    "links": exchanged,
}
