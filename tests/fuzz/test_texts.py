"""Text of random tokenizers at random chunkings: that of all tokens, cut before a text to stop at."""

from __future__ import annotations

import random

import pytest

from attnzoo.data.unfolding import UNKNOWN, Decoding, Unfolding

tokenizers = pytest.importorskip("tokenizers")

LETTERS = "ab\u00e9\u05e9\u4e2d\u6587\u0301\U0001f917\u200d\ufffd \n.,'"


def tokenizer(rng: random.Random):
    """One of random pieces of words, with a decoder of a random kind, and how pieces of it end words."""
    decoders, kind = tokenizers.decoders, rng.choice(["fallback", "fallback", "level", "metaspace", "words"])
    pieces = {"".join(rng.choices(LETTERS.strip(), k=rng.randint(1, 3))) for _ in range(20)}
    if kind == "level":
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        pieces = {"".join(rng.choices(alphabet, k=rng.randint(1, 4))) for _ in range(40)} | set(alphabet)
        decoder = decoders.ByteLevel()
    elif kind == "words":
        pieces |= {f"##{piece}" for piece in pieces}
        decoder = decoders.WordPiece(cleanup=rng.random() < 0.5)
    elif kind == "metaspace":
        pieces |= {f"\u2581{piece}" for piece in pieces} | {"\u2581"}
        decoder = decoders.Metaspace(prepend_scheme=rng.choice(["always", "first", "never"]))
    else:
        some = rng.choice([256, 256, 128])
        pieces |= {f"\u2581{piece}" for piece in pieces} | {f"<0x{byte:02X}>" for byte in range(some)} | {"\u2581"}
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if rng.random() < 0.7 else parts)
    names = sorted(pieces)
    rng.shuffle(names)
    made = tokenizers.Tokenizer(tokenizers.models.BPE({name: n for n, name in enumerate(names)}, []))
    made.decoder = decoder
    made.add_special_tokens(rng.sample(["<s>", "</s>", "<|im_end|>", "<|end|>"], rng.randint(0, 3)))
    return kind, made


def drawn(made, rng: random.Random, count: int) -> list[int]:
    """Tokens, among them whole characters that are spelled in bytes."""
    found: list[int] = []
    while len(found) < count:
        letter = rng.choice(LETTERS)
        spelled = [made.token_to_id(f"<0x{byte:02X}>") for byte in letter.encode()]
        found += spelled if None not in spelled and rng.random() < 0.5 else [rng.randrange(made.get_vocab_size())]
    return found


def pieces_of(unfolding: Unfolding, tokens: list[int], rng: random.Random) -> list[str]:
    found, at = [], 0
    while at < len(tokens) and not unfolding.ended:
        at = min(len(tokens), at + rng.randint(1, 5))
        found.append(unfolding.after(tokens[:at], at == len(tokens)))
    return found


def test_text_is_the_same_at_every_chunking(fuzz):
    for rng in fuzz(75):
        kind, made = tokenizer(rng)
        ends = [n for name, n in made.get_vocab().items() if name.strip("\u2581#") in LETTERS and len(name) < 4]
        prompt = [*drawn(made, rng, rng.randint(0, 6)), *rng.choices(ends or [0], k=1)] if rng.random() < 0.6 else []
        tokens = drawn(made, rng, rng.randint(1, 25))
        before, whole = made.decode(prompt), made.decode([*prompt, *tokens])
        if not whole.startswith(before):
            continue  # the prompt ends within a character
        decoding = Decoding.of_tokenizer(made)
        found = pieces_of(Unfolding(decoding, prompt), tokens, rng)
        story = (kind, fuzz.seed, prompt, tokens, found)
        assert "".join(found) == whole[len(before) :], story
        assert sum(piece.count(UNKNOWN) for piece in found) == whole[len(before) :].count(UNKNOWN), story


def test_text_ends_before_the_first_to_stop_at(fuzz):
    for rng in fuzz(75):
        kind, made = tokenizer(rng)
        tokens = drawn(made, rng, rng.randint(1, 25))
        whole = made.decode(tokens)
        at = rng.randrange(len(whole) + 1)
        stops = [text for text in (whole[at : at + rng.randint(1, 4)], "never" + rng.choice(LETTERS)) if text]
        ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
        expected = whole[: min(ends)[1]] if ends else whole
        decoding = Decoding.of_tokenizer(made)
        unfolding = Unfolding(decoding, stop=stops)
        found = pieces_of(unfolding, tokens, rng)
        assert "".join(found) == expected, (kind, fuzz.seed, tokens, stops, found)
        assert unfolding.ended == bool(ends)
