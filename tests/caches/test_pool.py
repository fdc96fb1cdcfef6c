"""Properties of the pages that keys are kept in."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnzoo import build_attention
from attnzoo.forms.caches import device_memory
from attnzoo.forms.caches.pages.page_table import PoolSizes
from attnzoo.forms.caches.pages.pool import PAGE, KeyPool

B, G, R, K, V = 3, 2, 2, 8, 4
H = G * R


def tokens(T: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v, g = (torch.randn(B, T, *shape, generator=generator) for shape in ((G, K), (G, V), (H,)))
    return k, v, torch.nn.functional.logsigmoid(g + 1)


def pool_of(*pieces: int) -> tuple[KeyPool, tuple[Tensor, Tensor, Tensor]]:
    pool, parts = KeyPool.empty(PoolSizes(B, G, R, K, V), dtype=torch.float32), tokens(sum(pieces))
    start = 0
    for T in pieces:
        pool.append(*(x[:, start : start + T] for x in parts))
        start += T
    return pool, parts


def check(pool: KeyPool, k: Tensor, v: Tensor, log_decay: Tensor, row: int, source: int | None = None) -> None:
    """Row ``row`` of the pool holds these tokens ``[T, ...]``."""
    T = len(k)
    assert pool.lengths[row] == int(pool.length[row]) == T
    c = log_decay.double().cumsum(0)
    tails = torch.logcumsumexp(-c, 0)
    for g in range(G):
        keys, values, decay, start = pool.gather(row, g)
        assert torch.equal(keys, k[start:, g])
        assert torch.equal(values, v[start:, g])
        heads = slice(g * R, (g + 1) * R)
        assert decay is not None
        assert torch.allclose(decay, (c[-1] - c)[start:, heads], atol=1e-5, rtol=0)
        for n in range(start // PAGE, -(-T // PAGE)):
            page = slice(n * PAGE, min((n + 1) * PAGE, T))
            longest = k[page, g].norm(dim=-1).max()
            assert longest <= pool.k_norm[row, g, n] <= longest * (1 + 1e-5)
            assert pool.n_log is not None
            assert torch.allclose(pool.n_log[row, heads, n], tails[page.stop - 1, heads], atol=1e-5, rtol=0)


def test_tokens_come_back_whatever_the_pieces() -> None:
    for pieces in ((1,) * 3, (200,), (PAGE, 1), (PAGE - 1, 1, 1), (1, 150, 1, 60)):
        pool, parts = pool_of(*pieces)
        for b in range(B):
            check(pool, *(x[b] for x in parts), row=b)
        assert pool.used() == B * G * -(-sum(pieces) // PAGE)


def test_padding_is_not_stored() -> None:
    pool, parts = KeyPool.empty(PoolSizes(B, G, R, K, V), dtype=torch.float32), tokens(300)
    valid = torch.rand(B, 300, generator=torch.Generator().manual_seed(1)) < torch.tensor([[0.9], [0.0], [0.3]])
    for start, stop in ((0, 150), (150, 151), (151, 300)):
        pool.append(*(x[:, start:stop] for x in parts), valid[:, start:stop])
    assert pool.lengths == valid.sum(1).tolist()
    for b in (0, 2):
        check(pool, *(x[b, valid[b]] for x in parts), row=b)
    assert pool.used() == G * sum(-(-n // PAGE) for n in pool.lengths)


def test_rows_that_share_pages_write_to_their_own() -> None:
    pool, parts = pool_of(100)
    pool.select(torch.tensor([2, 0, 2]))
    assert pool.used() == 2 * G * 2
    more = tokens(70, seed=5)
    pool.append(*more)
    for row, source in enumerate((2, 0, 2)):
        check(pool, *(torch.cat([x[source], y[row]]) for x, y in zip(parts, more, strict=True)), row=row)
    assert pool.used() == G * (2 * 3 + 2)  # the first page of two rows is still one
    pool.reset(0)
    pool.select(torch.tensor([1, 1, 2]))
    check(pool, *(torch.cat([x[0], y[1]]) for x, y in zip(parts, more, strict=True)), row=0)
    assert pool.used() == G * (3 + 3)
    for row in range(B):
        pool.reset(row)
    assert pool.used() == 0
    assert sorted(pool.free) == list(range(len(pool.k)))


def test_a_cache_that_would_fill_the_memory_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number, and nothing has changed: in pages, and in growing buffers."""
    pool, parts = pool_of(100)
    attn = build_attention("fox", hidden_size=16, num_heads=2)
    x, cache = torch.randn(1, 300, 16), attn.new_cache()
    with torch.no_grad():
        attn(x, cache=cache)
        monkeypatch.setattr(device_memory, "available", lambda device: 1 << 12)
        before = pool.bytes()
        with pytest.raises(MemoryError, match=r"cache of 300 tokens, 12 pages more: expected room for 0.00 GiB on cpu"):
            pool.append(*tokens(100))
        with pytest.raises(MemoryError, match="cache of 301 tokens, with room for 512: expected room for 0.00 GiB"):
            attn(x[:, :1], cache=cache)
        monkeypatch.undo()
        assert pool.bytes() == before
        check(pool, *(y[0] for y in parts), row=0)
        attn(x[:, :1], cache=cache)


def test_a_container_has_the_room_that_its_limit_leaves(tmp_path: Path) -> None:
    for name, content in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 400\ninactive_file 200\n")):
        assert device_memory._of_container(tmp_path) is None
        (tmp_path / f"memory.{name}").write_text(content)
    assert device_memory._of_container(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory._of_container(tmp_path) is None


def test_the_memory_of_free_pages_is_given_back() -> None:
    pool, parts = pool_of(200)
    pool.reset(1)
    size = pool.bytes()
    pool.compact()
    assert len(pool.k) == pool.used() == 2 * G * 4
    assert pool.bytes() < size
    pool.append(*tokens(1))
    check(pool, *(torch.cat([x[2], y[2]]) for x, y in zip(parts, tokens(1), strict=True)), row=2)


@pytest.mark.parametrize("number", [5, PAGE - 1, PAGE, PAGE + 40, 170])
def test_tokens_are_taken_back_across_closed_gates(number: int) -> None:
    """What the pool says is as if they had never been, and so is what follows them."""
    k, v, g = tokens(200)
    g[:, [3, 63, 64, 101, 140, 160]] = -math.inf
    g[1, :, 2] = -math.inf
    lengths, more = [number, 90, 200], tuple(x[:, 100:150] for x in (k, v, g))
    pool, shorter = (KeyPool.empty(PoolSizes(B, G, R, K, V), dtype=torch.float32) for _ in range(2))
    pool.append(k, v, g)
    pool.crop(lengths)
    shorter.append(k, v, g, torch.arange(200) < torch.tensor(lengths)[:, None])
    for _ in range(2):
        assert pool.since is not None
        assert shorter.since is not None
        assert torch.equal(pool.since, shorter.since)
        assert torch.equal(pool.first, shorter.first)
        assert torch.equal(pool.certified(-9.0, None), shorter.certified(-9.0, None))
        assert torch.equal(pool.k_norm, shorter.k_norm)
        for length in range(0, int(pool.length.min()), 7):  # what will be left when tokens are taken back again
            before, expected = (one.closed_before(pool.length - length) for one in (pool, shorter))
            assert before is not None
            assert expected is not None
            assert torch.equal(before, expected)
        for b in range(B):
            for a, c in zip(pool.gather(b, 1), shorter.gather(b, 1), strict=True):
                assert a == c if isinstance(a, int) else torch.allclose(a, c, rtol=0, atol=1e-5)
        for one in (pool, shorter):
            one.append(*more)


def test_a_sequence_of_another_pool_goes_on_here() -> None:
    pool, parts = pool_of(100)
    other = KeyPool.empty(PoolSizes(1, G, R, K, V), dtype=torch.float32)
    k, v, g = (x[:1] for x in tokens(150, seed=3))
    other.append(k, v, g)
    pool.reset(1)
    pool.adopt(1, other, 4 * PAGE)
    before = pool.used()
    check(pool, k[0], v[0], g[0], row=1)
    more = tokens(80, seed=5)
    pool.append(*more)  # row 1 has its pages already
    assert pool.used() == before + (B - 1) * G
    check(pool, *(torch.cat([x[0], y[1]]) for x, y in zip((k, v, g), more, strict=True)), row=1)
    check(pool, *(torch.cat([x[0], y[0]]) for x, y in zip(parts, more, strict=True)), row=0)


def test_pages_that_are_reserved_already_are_not_taken_again() -> None:
    pool, _ = pool_of(10)
    pool.reserve([3 * PAGE, 0, 1])
    used = pool.used()
    pool.reserve([2 * PAGE, 0, 1])
    assert used == pool.used() == B * G + 3 * G
    assert torch.equal(pool.table, pool.pages)


def test_pages_that_are_reserved_are_not_shared() -> None:
    pool, parts = pool_of(PAGE)
    pool.reserve([100] * B)
    pool.select(torch.tensor([0, 0, 2]))
    more = tokens(100, seed=5)
    pool.append(*more)
    for row, source in enumerate((0, 0, 2)):
        check(pool, *(torch.cat([x[source], y[row]]) for x, y in zip(parts, more, strict=True)), row=row)
    assert torch.equal(pool.table, pool.pages)
