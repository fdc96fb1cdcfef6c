"""Text that becomes known token by token is the text of all tokens, and ends before texts to stop at."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo.data.bpe import END
from attnzoo.data.tokenizer import byte_tokenizer, text_of_bytes
from attnzoo.data.unfolding import Decoding, Unfolding

tokenizers = pytest.importorskip("tokenizers")
END_OF_TURN = "<|im_end|>"


def byte_fallback():
    """As Llama 2's and Mistral's: words of the vocabulary, bytes for what is not in it, a newline among them."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcde\u4e2d\u05d0"]
    model = tokenizers.models.BPE(
        vocab={token: number for number, token in enumerate(vocabulary)},
        merges=[],
        byte_fallback=True,
        unk_token="<unk>",
    )
    made, after = tokenizers.Tokenizer(model), tokenizers.decoders
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    made.decoder = after.Sequence(
        [after.Replace("\u2581", " "), after.ByteFallback(), after.Fuse(), after.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>", "</s>", END_OF_TURN])
    return made


def byte_level():
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END_OF_TURN], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["\u65e5\u672c\u8a9e abc \u05e9\u05dc\u05d5\u05dd \U0001f917 e\u0301"] * 9, trainer)
    return made


KINDS = {"byte fallback": byte_fallback(), "byte level": byte_level(), "bytes": byte_tokenizer()}
DECODINGS = {kind: Decoding.of_tokenizer(tokenizer) for kind, tokenizer in KINDS.items()}
LETTERS = "ab cde\n\t\u4e2d\u6587\u5b57\u05d0\u05e9\u05dc"
LETTERS += "\u0301\u0308\U0001f917\U0001f3c3\U0001f3fd\u200d\u2640\ufe0f\ufffd\u00e9"
texts = st.text(st.sampled_from(LETTERS), max_size=24)


def unfolded(decode, prompt, tokens, steps, stop=()):
    """The pieces by tokens that come several at a time, and where it ended."""
    unfolding, pieces, at, turn = Unfolding(decode, prompt, stop), [], 0, 0
    while at < len(tokens) and not unfolding.ended:
        at = min(at + steps[turn % len(steps)], len(tokens))
        turn += 1
        pieces.append(unfolding.after(tokens[:at], at == len(tokens)))
    return pieces, at


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(before=texts, text=texts, cut=st.integers(0, 3), steps=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_are_the_text_of_all_tokens(kind, before, text, cut, steps):
    tokenizer = KINDS[kind]
    prompt = tokenizer.encode("a" + before + "b").ids
    tokens = tokenizer.encode("a" + before + "b" + text).ids[len(prompt) :]
    tokens = tokens[: len(tokens) - cut]
    whole = tokenizer.decode([*prompt, *tokens]).removeprefix(tokenizer.decode(prompt))
    for decode in (DECODINGS[kind], *([] if cut else [lambda ids: tokenizer.decode(list(ids))])):
        pieces, _ = unfolded(decode, prompt, tokens, steps)
        assert "".join(pieces) == whole
    alone, _ = unfolded(DECODINGS[kind], [], tokens, steps)
    assert "".join(alone) == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(seed=st.randoms(use_true_random=False), step=st.integers(1, 4))
def test_pieces_of_any_tokens_are_their_text(kind, seed, step):
    """Of broken characters, too, and of special tokens in between."""
    tokenizer = KINDS[kind]
    tokens = seed.choices(range(tokenizer.get_vocab_size()), k=20)
    pieces, _ = unfolded(DECODINGS[kind], [], tokens, [step])
    assert "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("text", ["\u65e5\u672c\u8a9e", "\U0001f917\U0001f917", "na\u00efve \u05e9\u05dc\u05d5\u05dd"])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 8])
def test_a_prompt_that_ends_in_a_byte_does_not_spoil_what_follows(text, step):
    tokenizer = KINDS["byte fallback"]
    prompt = tokenizer.encode("a\n").ids
    tokens = tokenizer.encode("a\n" + text).ids[len(prompt) :]
    decode = Decoding.of_tokenizer(tokenizer)
    assert "".join(unfolded(decode, prompt, tokens, [step])[0]) == text
    broken = "".join(unfolded(decode, prompt, [*tokens[:-1], tokenizer.token_to_id("b")], [step])[0])
    assert set(broken) <= {"\ufffd", *text, "b"}


@pytest.mark.parametrize("kind", ["byte fallback", "byte level"])
@settings(max_examples=80, deadline=None)
@given(
    first=texts, second=texts, third=texts, stop=texts.filter(bool),
    around=st.sampled_from(["", END_OF_TURN, END_OF_TURN + "\n", "b" + END_OF_TURN]), step=st.integers(1, 5),
)  # fmt: skip
def test_a_text_to_stop_at_is_cut_exactly_and_nothing_of_it_shown(kind, first, second, third, stop, around, step):
    tokenizer = KINDS[kind]
    stop = around or stop
    content = "a" + first + "b" + END_OF_TURN + "\n" + second + stop + third
    prompt, tokens = tokenizer.encode("c").ids, tokenizer.encode(content).ids
    known = tokenizer.decode([*prompt, *tokens], skip_special_tokens=END_OF_TURN not in stop)
    known = known.removeprefix(tokenizer.decode(prompt))
    expected = known[: known.index(stop)].replace(END_OF_TURN, "")
    pieces, _ = unfolded(DECODINGS[kind], prompt, tokens, [step], [stop, "never\ue000"])
    assert "".join(pieces) == expected


def test_a_special_token_ends_a_text_at_once_and_a_beginning_is_held_back():
    tokenizer = KINDS["byte level"]
    end, a = tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id("a")
    newline = tokenizer.encode("\n").ids[0]
    decode = Decoding.of_tokenizer(tokenizer)
    assert unfolded(decode, [a], [a, a, end, a], [1], [END_OF_TURN]) == (["a", "a", ""], 3)
    assert unfolded(decode, [a], [a, end, newline, a], [1], [END_OF_TURN + "\n"]) == (["a", "", ""], 3)
    assert unfolded(decode, [a], [a, end, a, newline], [1], ["a" + END_OF_TURN + "\n"])[0] == ["", "", "a", "a\n"]
    spelled = tokenizer.encode("aa" + END_OF_TURN[:5] + "x").ids
    assert "".join(unfolded(decode, [a], spelled, [1], [END_OF_TURN])[0]) == "aa" + END_OF_TURN[:5] + "x"
    tokenizer.encode_special_tokens = True
    spelled = tokenizer.encode("aa" + END_OF_TURN + "x").ids
    tokenizer.encode_special_tokens = False
    assert end not in spelled
    assert "".join(unfolded(decode, [a], spelled, [1], [END_OF_TURN])[0]) == "aa"


def test_the_name_of_bytes_end_is_a_text_to_stop_at():
    decode = Decoding(text_of_bytes, {END: 0})
    assert "".join(unfolded(decode, [], [*b"ab", 0, *b"cd"], [1], [END])[0]) == "ab"
    assert "".join(unfolded(decode, [], [*b"ab", 0, *b"cd"], [1])[0]) == "abcd"


def test_a_long_run_of_bytes_is_decoded_once():
    tokenizer, decoded = KINDS["byte fallback"], []
    found = Decoding.of_tokenizer(tokenizer)
    counted = Decoding(lambda ids: decoded.append(len(ids)) or tokenizer.decode(list(ids)), found.special, found.pieces)
    tokens = tokenizer.encode("a" + "\u65e5" * 200 + "b").ids
    pieces, _ = unfolded(counted, [], tokens, [1])
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert sum(decoded) < 4 * len(tokens)


def test_a_huge_text_to_stop_at_costs_no_more_than_what_is_held_back():
    text = Unfolding(text_of_bytes, (), ["x" * 10**6])  # each of its beginnings would be compared
    assert "".join(text.after([*b"ab", *b"x" * n], done=n == 20) for n in range(21)) == "ab" + "x" * 20
