"""The commands of the tutorials that lead from text to a model elsewhere, one after the other, at a tiny size."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import DOCS, FENCE

from attnzoo.cli import app
from attnzoo.registry import pairs, unregister
from attnzoo.registry.table import BUILT_IN

pytest.importorskip("transformers")

SIZES = (
    "model.hidden_size=32", "model.num_layers=1", "model.num_heads=2", "model.intermediate_size=32",
    "model.vocab_size=2048",
)  # fmt: skip
SHORT = (
    "data.context_length=32", "steps=2", "batch_size=2", "gradient_accumulation=1", "mixed_precision=none",
    "optimizer.warmup_steps=1", "eval_tokens=100", "progress=quiet", "tensorboard=false", "device=cpu",
)  # fmt: skip


def run(page: str, *overrides: str) -> list[list[str]]:
    """Every command of a page, in order, training with `overrides`; the commands as words."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    done = []
    for block in (match[2] for match in FENCE.finditer(text) if match[1] == "bash"):
        for line in block.strip().splitlines():
            words = shlex.split(line)
            assert words[0] == "attnzoo"
            more = overrides if words[1] in ("train", "convert") else ()
            given = {word.partition("=")[0]: word for word in (*words[1:], *more)}  # ours in place of the page's
            ran = CliRunner().invoke(app, [*given.values()], catch_exceptions=False)
            assert ran.exit_code == 0, ran.output
            done.append(words)
    return done


def write_texts() -> None:
    Path("texts").mkdir()
    for name in "abcd":
        Path("texts", f"{name}.txt").write_text("".join(f"{n} and {name} make {n}{name}.\n" for n in range(60)))


def test_from_text_to_a_model_that_writes_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts()
    commands = run("tutorials/train_and_export.md", *SIZES, *SHORT)
    assert [words[1] for words in commands] == ["tokenize", "train", "export"]
    page = (DOCS / "tutorials" / "train_and_export.md").read_text()
    (code,) = re.findall(r"`write\.py`.*?```python\n(.*?)```", page, flags=re.DOTALL)
    Path("write.py").write_text(code + "print(text)")
    ran = subprocess.run([sys.executable, "write.py"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("3 and 4")


def write_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from attnzoo.data.bpe import train_bpe
    from attnzoo.data.tokenizer import tokenizer_files

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=280, eos_token_id=0)).save_pretrained("llama")
    for name, content in tokenizer_files(train_bpe(["a and b make c.\n"], 270)).items():
        Path("llama", name).write_bytes(content)


def test_from_a_llama_to_a_fox(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts()
    write_llama()
    commands = run("tutorials/llama_to_fox.md", *SHORT)
    assert [words[1] for words in commands] == ["import", "tokenize", "train", "train", "export"]
    assert {path.name for path in Path("models/fox").iterdir()} >= {"model.safetensors", "tokenizer.json"}


def test_from_a_llama_to_a_fox_layer_by_layer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts()
    write_llama()
    commands = run("how-to/convert.md", *SHORT)
    assert [words[1] for words in commands] == [
        "import", "tokenize", "convert", "train", "train", "train", "evaluate", "export", "convert", "convert",
    ]  # fmt: skip
    settings = json.loads(Path("models/fox/config.json").read_text())
    assert settings["attention"] == "fox_rope"
    assert settings["attention_options"]["gate_bias"] == 9.704  # of Llama's 2048 tokens


def test_a_misspelt_variant_is_refused_in_the_words_that_the_tutorial_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, page = ((DOCS / "tutorials" / name).read_text() for name in ("first_fox.md", "swap_the_variant.md"))
    Path("first.yaml").write_text(next(match[2] for match in FENCE.finditer(first) if match[1] == "yaml"))
    ((command, shown),) = re.findall(r"```bash\nattnzoo ([^`\n]*)\n```\n\n```text\nattnzoo: (.*)\n```", page)
    ran = CliRunner().invoke(app, shlex.split(command))
    assert str(ran.exception) == shown


def test_a_variant_of_the_reader_is_shown_as_the_tutorial_prints_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "tutorials" / "new_variant.md").read_text()
    Path("sandwich.py").write_text(re.findall(r"`sandwich\.py`.*?```python\n(.*?)```", page, flags=re.DOTALL)[0])
    shown = re.findall(r"```text\n(sandwich_path, .*?)```", page, flags=re.DOTALL)[0]
    try:
        assert CliRunner().invoke(app, ["show", "sandwich.py"]).output.startswith(shown)
    finally:
        for pair in pairs()[len(BUILT_IN) :]:
            unregister(pair)
