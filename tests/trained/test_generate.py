"""`attnzoo generate` continues a text as the model does, from a run and from a model folder, and says how."""

import re
import shutil
import sys
from types import SimpleNamespace

import click
import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from tiny_runs import config_of, write_text

from attnzoo import cli
from attnzoo.data import decode, encode
from attnzoo.data.bpe import END
from attnzoo.data.tokenizer import byte_tokenizer, byte_tokens, text_of_bytes
from attnzoo.data.unfolding import Unfolding
from attnzoo.errors import NotFiniteError, UnavailableError
from attnzoo.models import Generator
from attnzoo.trained import exchange
from attnzoo.trained.continuation import Continuation, draft_of, load_text_model
from attnzoo.training import load_run, train

PROMPT = "7 and one is"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    write_text(folder)
    model = "model={hidden_size: 32, intermediate_size: 32, num_layers: 2, num_heads: 2, attention: [mamba2, fox]}"
    pro = "model.attention_options={block: pro}"
    return train(config_of(folder, "run", model, pro))


def ran(*arguments):
    found = CliRunner().invoke(cli.app, ["generate", *map(str, arguments)], catch_exceptions=False)
    return found.stdout, found.stderr


def test_the_text_is_the_models_own_and_the_summary_says_how_it_went(run):
    model, _ = load_run(run)
    tokens = model.generate(torch.tensor([encode(PROMPT)]), 30, temperature=0)[0].tolist()
    expected = decode(tokens[: tokens.index(0, len(PROMPT)) if 0 in tokens[len(PROMPT) :] else None])
    text, said = ran(run, "--prompt", PROMPT, "--max-tokens", 30, "--temperature", 0, "--device", "cpu")
    assert text == expected + "\n"
    assert re.search(r"30 tokens after 12 of the prompt \(.* s\), [\d.]+ tokens/s\n", said)
    assert "caches: " in said
    assert "keys kept per head: all 41\n" in said  # the last token is not read again


def test_another_run_may_propose_tokens_and_changes_none(run):
    options = ("--prompt", PROMPT, "--max-tokens", 30, "--temperature", 0, "--device", "cpu")
    text, said = ran(run, *options, "--draft", run, "--draft-tokens", 3)
    assert text == ran(run, *options)[0]
    [(taken, proposed)] = re.findall(r"(\d+) of (\d+) proposed tokens were the model's own\n", said)
    assert int(taken) == int(proposed) > 15  # its own
    loaded = load_text_model(run, "cpu")
    other = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=7)), encode=loaded.encode)
    with pytest.raises(
        ValueError, match=r"--draft: expected a model with the same tokens \(\d+\), got one with others"
    ):
        draft_of(loaded, other, 3)
    with pytest.raises(ValueError, match="--draft-tokens: expected none without --draft, got 3"):
        ran(run, *options, "--draft-tokens", 3)


def test_keys_in_8_bits_take_less_memory(run):
    options = ("--prompt", PROMPT, "--max-tokens", 30, "--temperature", 0, "--device", "cpu")
    whole, half = (
        float(re.search(r"caches: ([\d.]+) KiB", ran(run, *options, *more)[1])[1])
        for more in ((), ("--kv-dtype", "fp8"))
    )
    assert half < 0.8 * whole  # beside a matrix


def test_several_processes_read_a_prompt_together_and_the_first_writes(run, monkeypatch):
    given = []
    monkeypatch.setattr("attnzoo.training.launch.launch", lambda *arguments: given.append(arguments))
    ran(run, "--prompt", PROMPT, "--temperature", 0, "--device", "cpu", "--processes", 2)
    words = [str(run), f"--prompt={PROMPT}", "--max-tokens=200", "--temperature=0.0", "--top-p=1.0", "--seed=0"]
    assert given == [([sys.executable, "-m", "attnzoo", "generate", *words, "--device=cpu"], 2)]
    with pytest.raises(ValueError, match="--processes: expected 1 with --evict"):
        ran(run, "--prompt", PROMPT, "--evict", 1e-3, "--device", "cpu", "--processes", 2)
    loaded = load_text_model(run, "cpu")

    def rank(_):
        return "".join(Continuation(loaded, PROMPT, 12, sampling={"temperature": 0.0}, over=dist.group.WORLD))

    alone = ran(run, "--prompt", PROMPT, "--max-tokens", 12, "--temperature", 0, "--device", "cpu")[0]
    assert [PROMPT + text + "\n" for text in on_ranks(2, rank)] == [alone, alone]


def test_a_run_on_bytes_needs_no_tokenizer(run, monkeypatch):
    options = ("--prompt", PROMPT, "--max-tokens", 8, "--temperature", 0, "--device", "cpu")
    text = ran(run, *options)[0]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert ran(run, *options)[0] == text


def test_bytes_are_those_of_their_tokenizer():
    tokenizer = byte_tokenizer()
    for text in ("", "a gate", f"one{END}{END}zwei\0, für € 🙂{END}"):
        assert byte_tokens(text) == tokenizer.encode(text).ids
    for seed in range(300):
        tokens = torch.randint(290, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert text_of_bytes(tokens) == tokenizer.decode(tokens)


def test_a_model_folder_and_its_run_say_the_same(run, tmp_path):
    pytest.importorskip("transformers")
    folder = exchange.export_run(run, tmp_path / "model")
    options = ("--prompt", PROMPT, "--max-tokens", 20, "--seed", 3, "--top-k", 50, "--top-p", 0.9, "--device", "cpu")
    assert ran(folder, *options)[0] == ran(run, *options)[0]
    assert ran(run, *options[:5], 4, *options[6:])[0] != ran(run, *options)[0]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"tokenizer: expected a tokenizer.json .*; `tokenizer.save_pretrained\('.*model'\)` writes one",
    ):
        ran(folder, *options)


def test_text_beside_a_larger_vocabulary_is_bytes(tmp_path):
    write_text(tmp_path)
    source = train(config_of(tmp_path, "run", "data.vocab_size=300", "model.vocab_size=300"))
    folder = exchange.export_run(source, tmp_path / "model")
    assert (
        load_text_model(source, "cpu").encode(PROMPT) == load_text_model(folder, "cpu").encode(PROMPT) == encode(PROMPT)
    )
    options = ("--prompt", PROMPT, "--max-tokens", 8, "--device", "cpu")
    assert ran(source, *options)[0] == ran(folder, *options)[0]


@pytest.mark.parametrize("kind", ["file", "folder", "gone"])
def test_tokens_of_a_file_are_not_taken_for_bytes(kind, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(600, dtype=np.uint16) % 300)
    source = tmp_path / "tokens.npy"
    if kind != "file":
        source = tmp_path / "folder"
        source.mkdir()
        (tmp_path / "tokens.npy").rename(source / "tokens.npy")
    options = (f"data.source={source}", "data.vocab_size=300", "model.vocab_size=300")
    run = train(config_of(tmp_path, "run", *options))
    if kind == "gone":
        shutil.rmtree(source)
    with pytest.raises(ValueError, match="was trained on tokens whose text is not known here"):
        load_text_model(run, "cpu")


def test_run_on_a_task_has_no_text_to_go_on_with(tmp_path):
    run = train(config_of(tmp_path, "a run", "data.source=task:parity", "model.vocab_size=2"))
    with pytest.raises(
        ValueError, match="on the task 'parity', whose tokens stand for no text; `attnzoo evaluate '.*run'` asks"
    ):
        load_text_model(run, "cpu")


def test_keys_given_up_are_said_by_layer_and_head(run):
    options = ("--prompt", PROMPT, "--max-tokens", 9, "--temperature", 0, "--device", "cpu")
    text, said = ran(run, *options, "--evict", 1e-4)
    assert text == ran(run, *options)[0]
    assert "keys kept per head, layer 1, of 20: 20 20\n" in said
    assert "for keys that were given up, no token lost more than 0.0001 of its weight\n" in said
    with pytest.raises(ValueError, match="evict: expected a weight in"):
        ran(run, *options, "--evict", 2)


def test_the_text_ends_before_one_to_stop_at_and_on_ctrl_c(run, monkeypatch):
    options = (run, "--prompt", PROMPT, "--max-tokens", 40, "--temperature", 0, "--device", "cpu")
    whole, said = ran(*options, "--evict", 1e-4)
    new = whole[len(PROMPT) : -1]
    stop = new[9:13]
    text, said = ran(*options, "--stop", "never\n", "--stop", stop, "--stop", stop[0] + "never")
    assert text == PROMPT + new[: new.index(stop)] + "\n"
    drawn = int(re.match(r"(\d+) tokens after", said)[1])
    assert new.index(stop) < drawn < 40
    assert "keys kept per head: all " in said
    with pytest.raises(ValueError, match="stop: expected texts of at least one character, got ''"):
        ran(*options, "--stop", "")
    step, steps = Generator.step, []

    def interrupted(self, *given):
        steps.append(len(steps))
        if len(steps) == 9:
            raise KeyboardInterrupt
        return step(self, *given)

    monkeypatch.setattr(Generator, "step", interrupted)
    found = CliRunner().invoke(cli.app, ["generate", *map(str, options), "--evict", "1e-4"], standalone_mode=False)
    assert isinstance(found.exception, click.Abort)
    assert PROMPT + new[:5] in found.stdout
    assert whole.startswith(found.stdout.rstrip("\n"))
    assert re.search(r"^\d+ tokens after 12 of the prompt", found.stderr, re.M)
    assert "keys kept per head, layer 1, of 20: 20 20\n" in found.stderr  # eight steps
    assert "caches: 0.0" not in found.stderr


def test_characters_are_shown_when_they_are_whole_and_few_tokens_are_decoded_again():
    tokenizer, decoded = pytest.importorskip("tokenizers") and byte_tokenizer(), []
    broken = b"ok \xf0\x9f then \xe6\x97A \xff\xff\xff\xff\xff\xff end \xe6\x97"
    text = "Zo\u00eb l\u00e4uft \U0001f3c3\U0001f3fd\u200d\u2640\ufe0f \u65e5\u672c\u8a9e. "
    for content in (text.encode(), broken, text.encode() * 20):
        tokens, pieces = [*content], []
        unfolding = Unfolding(lambda ids: decoded.append(len(ids)) or tokenizer.decode(list(ids)))
        for end in range(1, len(tokens) + 1):
            pieces.append(unfolding.after(tokens[:end], end == len(tokens)))
            if content != broken:
                known = content[:end].decode(errors="ignore")
                assert "".join(pieces) == known
        assert "".join(pieces) == content.decode(errors="replace")
    assert max(decoded) < 30


def test_words_of_a_tokenizer_that_gives_the_first_one_no_space_stay_apart():
    """As Llama 2's and Mistral's do."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer, words.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    words.train_from_iterator(
        ["the gate of a key closes"] * 9, tokenizers.trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False)
    )
    end, space = words.token_to_id("</s>"), words.token_to_id("\u2581")
    prompt, more = (
        words.encode("the gate").ids,
        [*words.encode("of a key").ids, end, space, *words.encode("closes").ids],
    )
    for before in (prompt, [end, *prompt], []):
        unfolding = Unfolding(words.decode, before)
        pieces = [unfolding.after(more[:n], n == len(more)) for n in range(1, len(more) + 1)]
        assert "".join(pieces) == words.decode([*before, *more]).removeprefix(words.decode(before))
        assert "".join(pieces).startswith(" of a key" if before else "of a key")


class Writes(torch.nn.Module):
    """A head that writes these tokens and then the last one."""

    def __init__(self, head, tokens):
        super().__init__()
        self.weight, self.tokens, self.step = head.weight, tokens, 0

    def forward(self, x):
        self.step += 1
        token = self.tokens[min(self.step, len(self.tokens)) - 1]
        return torch.nn.functional.one_hot(torch.tensor(token), len(self.weight)).expand(*x.shape[:-1], -1).float()


def written(run, tokens, **options):
    loaded = load_text_model(run, "cpu")
    loaded.model.head = Writes(loaded.model.head, tokens)
    continuation = Continuation(loaded, "7", 30, sampling={"temperature": 0.0}, **options)
    return "".join(continuation), continuation.request.tokens


@pytest.mark.parametrize("text", ["\u65e5\u672c\u8a9e", "na\u00efve \u05e9\u05dc\u05d5\u05dd \U0001f917"])
def test_text_of_byte_fallback_is_written_whole(text, run, tmp_path):
    """Four tokens become known at a time."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    words.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    exchange.export_run(run, tmp_path / "out")
    words.save(str(tmp_path / "out" / "tokenizer.json"))
    (tmp_path / "out" / "tokenizer_config.json").write_text("{}")
    assert written(tmp_path / "out", [*text.encode(), ord("\n")])[0] == text + "\n" * (30 - len(text.encode()))


def test_the_text_ends_at_a_special_tokens_name(run, tmp_path):
    exchange.export_run(run, tmp_path / "out")
    folder, tokens = tmp_path / "out", [*b"aaa", 7, *b"\nb", 7, *b"aa"]
    made = byte_tokenizer()
    (name,) = (name for name, token in made.get_vocab().items() if token == 7)
    made.add_special_tokens([name])
    made.save(str(folder / "tokenizer.json"))
    assert written(folder, tokens, stop=[name]) == ("aaa", tokens[:4])
    assert written(folder, tokens, stop=["never", name + "\n"])[0] == "aaa"
    assert written(folder, tokens, stop=["b" + name])[0] == "aaa\n"
    assert written(run, [*b"ab", 0], stop=[END]) == ("ab", [*b"ab", 0])


def test_a_run_whose_layers_forget_goes_on_within_a_budget(run):
    layers = "model.attention=[mamba2,{name: fox, options: {forgetting: {window: 2, width: 4}}}]"
    sizes = "model={hidden_size: 32, intermediate_size: 32, num_layers: 2, num_heads: 2}"
    done = train(config_of(run.parent, "forgets", layers, sizes, "forgetting={distill_steps: 2, anneal_steps: 6}"))
    half = shutil.copytree(done, run.parent / "half")
    shutil.rmtree(half / "checkpoints" / "step-00000008")
    options = ("--prompt", PROMPT, "--max-tokens", 20, "--temperature", 0, "--device", "cpu")
    model, _ = load_run(done)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([encode(PROMPT)]), 20, temperature=0, budget=5)[0].tolist()
    text, said = ran(done, *options, "--budget", 5)
    assert text == decode(tokens[: tokens.index(0, len(PROMPT)) if 0 in tokens[len(PROMPT) :] else None]) + "\n"
    found = re.search(r"keys kept per head, layer 1, of 31: (\d+) (\d+)\n", said)
    assert found
    assert 2 <= max(map(int, found.groups())) <= 5
    assert "layers that forget gave up keys as they were trained to" in said
    with pytest.raises(ValueError, match=r"got one that learns it \(blend = 0\.\d+, 1 from"):
        ran(half, *options)
    with pytest.raises(ValueError, match="budget: expected None .a budget is for layers with forget=...., got 5"):
        ran(run, *options, "--budget", 5)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_p": 0.9}])
def test_weights_that_are_no_numbers_are_an_error_and_no_text(sampling, run):
    loaded = load_text_model(run, "cpu")
    with torch.no_grad():
        loaded.model.norm.weight[3] = torch.nan
    with pytest.raises(NotFiniteError, match="logits: expected finite numbers after the prompt, got inf or nan"):
        next(iter(Continuation(loaded, PROMPT, 9, sampling=sampling)))


def test_what_cannot_be_continued_is_refused_by_name(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a run or a model folder, got .*, which does not exist"):
        ran(tmp_path / "nothing", "--prompt", "a")
    with pytest.raises(FileNotFoundError, match=r"neither config.yaml nor config.json \(perhaps '.*run'\?\)"):
        ran(run.parent, "--prompt", "a")
    with pytest.raises(FileNotFoundError, match="which is a file"):
        ran(run / "config.yaml", "--prompt", "a")
    with pytest.raises(ValueError, match="top_p: expected above 0 and at most 1, got 2.0"):
        ran(run, "--prompt", "a", "--top-p", 2, "--device", "cpu")
    with pytest.raises(ValueError, match="prompt: expected a text of at least one token, got ''"):
        ran(run, "--prompt", "", "--device", "cpu")
    loaded = load_text_model(run, "cpu")
    with pytest.raises(ValueError, match=r"prompt: expected text, got half of a surrogate pair at 1, '\\ud83e'"):
        Continuation(loaded, "a\ud83e", 4)
    with pytest.raises(ValueError, match="stop: expected text, got half of a surrogate pair at 0"):
        Continuation(loaded, "a", 4, stop=["b", "\udc00"])
    wrong = ["generate", str(run), "--prompt", "a", "--temperature", "-1"]
    refused = CliRunner().invoke(cli.app, wrong)
    assert isinstance(refused.exception, ValueError)
    assert refused.stdout == ""  # the prompt is shown with what follows it
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"holds a model of 'llama': `attnzoo import` makes it one of ours"):
        ran(tmp_path, "--prompt", "a", "--device", "cpu")


def test_a_model_folder_is_read_whole_or_refused(run, tmp_path):
    pytest.importorskip("transformers")
    folder = exchange.export_run(run, tmp_path / "model")
    whole = {name: x.clone() for name, x in load_file(folder / "model.safetensors").items()}  # not of the file written
    name = "model.blocks.1.attention.q_proj.weight"
    for weights, message in (
        ({key: x for key, x in whole.items() if key != name}, f"nothing was found for: {name.removeprefix('model.')}"),
        (whole | {"model.other": torch.zeros(1)}, "other: the model has no such weight"),
        (whole | {name: torch.zeros(3, 32)}, r"q_proj.weight: expected shape \[32, 32\], got \[3, 32\]"),
    ):
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{message}.* \(in {folder}\)"):
            load_text_model(folder, "cpu")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="its weights cannot be read"):
        load_text_model(folder, "cpu")
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config.json is not readable as JSON: .* line 1"):
        load_text_model(folder, "cpu")


def test_a_device_that_is_not_there_is_named(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (["generate", run, "--prompt", "a"], ["evaluate", run, "--on", "loss"]):
        with pytest.raises(UnavailableError, match="--device: expected a CUDA GPU, found none"):
            CliRunner().invoke(cli.app, [*map(str, command), "--device", "cuda"], catch_exceptions=False)
