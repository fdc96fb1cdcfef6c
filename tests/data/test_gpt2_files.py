"""GPT-2's tokenizer from its published files, and from those of tiktoken, is the one that they describe."""

import base64
import json

import pytest

pytest.importorskip("tokenizers")

from attnzoo.data.bpe import END, GPT2_END, shown_byte, train_bpe
from attnzoo.data.tokenizer import parse_tokenizer, read_tokenizer, tokenize

TEXTS = ["The quick brown fox, quickly; 1234 foxes don't.", "  two  spaces\n\nand ünïcödé \u20ac", "zzz" * 9]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The two files as transformers names them, with the end of a text last, and tiktoken's of the same tokens."""
    folder = tmp_path_factory.mktemp("gpt2")
    trained = json.loads(train_bpe(TEXTS * 3, 320).to_str())["model"]
    vocab = {token: number - 1 for token, number in trained["vocab"].items() if token != END}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in trained["merges"]]
    byte_of = {shown_byte(byte): byte for byte in range(256)}
    lines = [(number, bytes(byte_of[letter] for letter in token)) for token, number in vocab.items()]
    (folder / "r50k.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % n for n, t in sorted(lines)))
    (folder / "two").mkdir()
    (folder / "two" / "vocab.json").write_text(json.dumps({**vocab, GPT2_END: len(vocab)}))
    (folder / "two" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder


def test_both_kinds_of_files_give_the_tokens_of_transformers(published):
    transformers = pytest.importorskip("transformers")
    two = published / "two"
    theirs = transformers.GPT2TokenizerFast(str(two / "vocab.json"), str(two / "merges.txt"))
    for path in (two, published / "r50k.tiktoken"):
        ours = parse_tokenizer(read_tokenizer(path)["tokenizer.json"])
        for text in (*TEXTS, f"a{GPT2_END}b"):
            assert ours.encode(text).ids == theirs(text)["input_ids"]
            assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
        assert ours.token_to_id(GPT2_END) == ours.get_vocab_size() - 1


def test_texts_are_tokenized_by_it_and_end_as_gpt2s(published, tmp_path):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    done = tokenize([tmp_path / "texts"], tmp_path / "tokens", tokenizer=published / "two")
    last = done.shards.vocab_size - 1
    assert all((shard.tokens == last).sum() == shard.documents for shard in done.shards.train)


def test_other_vocabularies_of_tiktoken_are_refused(tmp_path):
    single = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    more = [base64.b64encode(b"%c%c" % divmod(n, 256)) + b" %d\n" % (256 + n) for n in range(2**16)]
    (tmp_path / "cl100k.tiktoken").write_bytes(b"".join(single + more))
    with pytest.raises(ValueError, match="^tokenizer: expected GPT-2's 50257 tokens or fewer, got 65792"):
        read_tokenizer(tmp_path / "cl100k.tiktoken")
    (tmp_path / "broken.tiktoken").write_bytes(b"nothing\n")
    with pytest.raises(ValueError, match=r"^tokenizer: .*broken.tiktoken' cannot be read"):
        read_tokenizer(tmp_path / "broken.tiktoken")
