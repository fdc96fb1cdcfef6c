"""lm-eval's questions through our adapter, against sums over the model's own logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("lm_eval")

import lm_eval

from attnzoo.config import ModelConfig
from attnzoo.data.unfolding import Decoding
from attnzoo.experiments.evaluate import harness, lines
from attnzoo.experiments.evaluate.harness import run_harness
from attnzoo.experiments.evaluate.suites import SUITES
from attnzoo.models import LanguageModel

END = 0


class Request:
    def __init__(self, *args):
        self.args = args


def encode(text):
    return list(text.encode())


def decode(tokens):
    return bytes(tokens).decode("latin-1")


def asked(model, encoded=encode, written=decode, end=END):
    decoding = written if isinstance(written, Decoding) else Decoding(written)
    stop = frozenset() if end is None else frozenset([end])
    return SimpleNamespace(model=model, encode=encoded, decode=decoding, end=end, stop=stop)


def adapted(model, *tokenizer, window=None, **of_it):
    return harness.HarnessModel(asked(model, *tokenizer, **of_it), window)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "initializer_range": 0.5}
    return LanguageModel(ModelConfig(attention="fox", **sizes)).eval()


@torch.no_grad()
def likelihood(model, tokens, asked):
    """Of the last tokens after those before them, and whether each is the likeliest."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0, -asked:].log_softmax(-1)
    expected = torch.tensor(tokens[-asked:])
    return -float(F.nll_loss(logits, expected, reduction="sum")), bool((logits.argmax(-1) == expected).all())


@pytest.mark.parametrize("held", [1, 2**15])
def test_continuations_are_scored_after_their_contexts_in_any_batch(model, monkeypatch, held):
    monkeypatch.setattr(harness, "TOKENS", held)
    asked = [("ab", "cd"), ("", "xyz"), ("a much longer context", " end"), ("two ", "2"), ("ab", "c")]
    found = adapted(model).loglikelihood([Request(*pair) for pair in asked])
    for (context, continuation), (value, greedy) in zip(asked, found, strict=True):
        tokens = [*(encode(context) or [END]), *encode(continuation)]
        count = len(continuation) + len(context) - len(context.rstrip())  # spaces at the end of the context count too
        expected = likelihood(model, tokens, count)
        assert value == pytest.approx(expected[0], rel=1e-4)
        assert greedy == expected[1]


def test_a_continuation_that_merges_with_its_context_is_scored(model):
    merges = {"self": 1, "one": 2, "sel": 3}

    def merged(text):
        for word, token in merges.items():
            text = text.replace(word, chr(token))
        return list(text.encode())

    adapter = adapted(model, merged)
    pairs = [("x=s", "elf"), ("x=on", "e"), ("sel", "f"), ("ab", "a longer one")]
    found = adapter.loglikelihood([Request(*pair) for pair in pairs])
    rows = [([*b"x=", 1], 1), ([*b"x=", 2], 1), ([END, 1], 1), ([*b"aba longer ", 2], len(b" longer ") + 2)]
    for (value, greedy), (tokens, count) in zip(found, rows, strict=True):
        expected = likelihood(model, tokens, count)
        assert value == pytest.approx(expected[0], rel=1e-4)
        assert greedy == expected[1]
    with pytest.raises(ValueError, match="continuation: expected 1 to any number of tokens, got 0"):
        adapter.loglikelihood([Request("ab", "")])


def test_likeliest_continuation_is_greedy(model):
    tokens = encode("hello")
    best = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
    adapter = adapted(model, lambda text: [ord(letter) for letter in text])
    ((_, greedy), (_, other)) = adapter.loglikelihood(
        [Request("hello", chr(best)), Request("hello", chr((best + 1) % 256 or 1))]
    )
    assert greedy
    assert not other


def test_of_a_long_row_the_last_tokens_count(model):
    adapter = adapted(model, window=6)
    ((value, _),) = adapter.loglikelihood([Request("abcdefghij", "klm")])
    assert value == pytest.approx(likelihood(model, encode("ghijklm"), 3)[0], rel=1e-4)
    with pytest.raises(ValueError, match="expected 1 to the window's 6 tokens, got 7"):
        adapter.loglikelihood([Request("a", "bcdefgh")])
    with pytest.raises(ValueError, match="window: expected at least 1"):
        adapted(model, window=0)


def test_every_token_of_a_text_is_scored_in_one_window(model):
    text = "0123456789"
    whole, cut = (
        adapted(model, window=window).loglikelihood_rolling([Request(text), Request("")]) for window in (None, 4)
    )
    tokens = [END, *encode(text)]
    assert whole == [pytest.approx(likelihood(model, tokens, 10)[0], rel=1e-4), 0.0]
    parts = [likelihood(model, tokens[:5], 4), likelihood(model, tokens[4:9], 4), likelihood(model, tokens[6:11], 2)]
    assert cut[0] == pytest.approx(sum(value for value, _ in parts), rel=1e-4)


def test_what_a_tokenizer_puts_first_stands_there_once(model):
    def starting(text):
        return [7, *text.encode()]

    found = adapted(model, starting, end=None).loglikelihood([Request("ab", "cd"), Request("", "cd")])
    for context, (value, _) in zip(("ab", ""), found, strict=True):
        assert value == pytest.approx(likelihood(model, [7, *encode(context + "cd")], 2)[0], rel=1e-4)
    with pytest.raises(ValueError, match="a token that ends documents"):
        adapted(model, end=None).loglikelihood([Request("", "cd")])


def test_generation_goes_on_until_a_text_comes_up_alike_in_any_batch(model):
    contexts = ["ab", "hello there", "x", ""]
    alone = []
    for context in contexts:
        tokens = torch.tensor([encode(context) or [END]])
        made = model.generate(tokens, 12, temperature=0)[0, tokens.shape[1] :].tolist()
        alone.append(decode(made[: made.index(END)] if END in made else made))
    adapter = adapted(model)
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    assert adapter.generate_until([Request(context, settings) for context in contexts]) == alone
    stop = alone[1][5:7]
    (text,) = adapter.generate_until([Request(contexts[1], {**settings, "until": stop})])
    assert text == alone[1][: alone[1].index(stop)]
    drawn = {"max_gen_toks": 6, "do_sample": True, "temperature": 2.0}
    one, two = (adapter.generate_until([Request("ab", drawn)]) for _ in range(2))
    assert one == two != [alone[0][:6]]
    for nearly in ({"top_k": 1}, {"temperature": 2e-38}, {"top_p": 1e-6}):
        (greedy,) = adapter.generate_until([Request("ab", {**drawn, **nearly})])
        assert greedy == alone[0][: len(greedy)]
    refused = (({"top_p": 1.5}, "top_p: expected above 0"), ({"topk": 5}, "did you mean 'top_k'"),
               ({"do_sample": True, "temperature": 1e-45}, "temperature: expected a number that float32"))  # fmt: skip
    for settings, message in refused:
        with pytest.raises(ValueError, match=message):
            adapter.generate_until([Request("ab", settings)])


def test_generation_ends_at_a_special_tokens_name_and_what_follows_is_not_scored(model, monkeypatch):
    """As `until: ["<|im_end|>"]` of a chat model, whose name is not in the text of its tokens."""
    end_of_turn, written = 7, [*b"aaa", 7, *b"\nb", 7, *b"aa"]
    decoding = Decoding(lambda tokens: decode([t for t in tokens if t != end_of_turn]), {"<|im_end|>": end_of_turn})
    steps: list[int] = []

    class Writes(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.weight = head.weight

        def forward(self, x):
            steps.append(written[len(steps) % len(written)])
            return F.one_hot(torch.tensor(steps[-1]), len(self.weight)).expand(*x.shape[:-1], -1).float()

    monkeypatch.setitem(model._modules, "head", Writes(model.head))
    adapter = adapted(model, written=decoding)
    for until, text, tokens in (
        ("<|im_end|>", "aaa", 4), ("<|im_end|>\n", "aaa", 5), ("b<|im_end|>", "aaa\n", 7), ("a\n", "aa", 5),
    ):  # fmt: skip
        steps.clear()
        assert adapter.generate_until([Request("x", {"until": [until], "max_gen_toks": 9})]) == [text]
        assert len(steps) == tokens


def test_a_window_without_room_for_a_context_beside_what_is_generated_is_refused(model):
    settings = {"until": [], "max_gen_toks": 6}
    narrow, wide = (adapted(model, window=window) for window in (6, 9))
    with pytest.raises(ValueError, match="window: expected more than the 6 tokens to generate .max_gen_toks., got 6"):
        narrow.generate_until([Request("hello there", settings)])
    [text], [end] = (wide.generate_until([Request(context, settings)]) for context in ("hello there", "ere"))
    assert text == end  # the last tokens count


@pytest.mark.parametrize(("name", "number"), [("limit", 0), ("limit", -1), ("shots", -1)])
def test_number_out_of_range_is_named(model, name, number):
    with pytest.raises(ValueError, match=f"{name}: expected at least ., got {number}"):
        run_harness(asked(model), "task.yaml", **{name: number})


def test_task_of_a_file_is_asked_without_a_network(model, tmp_path):
    rows = [
        {"q": "1 and one is", "choices": [" 2.", " 7."], "a": 0},
        {"q": "2 and one is", "choices": [" 9.", " 3."], "a": 1},
        {"q": "4 and one is", "choices": [" 5.", " 4."], "a": 0},
    ]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = tmp_path / "sums.yaml"
    path.write_text(
        "task: sums\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: sums.jsonl}}, cache_dir: {tmp_path / 'cache'}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: choices\n'
        "doc_to_target: a\n"
    )
    found = run_harness(asked(model), str(path), limit=2, window=64)
    right = []
    for row in rows[:2]:
        values = [likelihood(model, encode(row["q"] + choice), len(choice))[0] for choice in row["choices"]]
        right.append(values.index(max(values)) == row["a"])
    assert found.scores["sums"]["acc"] == sum(right) / 2
    assert (found.samples, found.limit, found.window) == ({"sums": 2}, 2, 64)
    assert lines.harness(found)[2].split()[:3] == ["sums", "2", "acc"]
    (tmp_path / "other.yaml").write_text("1")
    for name, message in (("other.yaml", "to name a task"), ("nothing.yaml", "there is no file")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            run_harness(asked(model), str(tmp_path / name))


def written(folder: Path, name: str, rows: list[dict], definition: str) -> Path:
    """A task's file with its questions beside it."""
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = folder / f"{name}.yaml"
    files = f"{{data_files: {{test: {name}.jsonl}}, cache_dir: {folder / 'cache'}}}"
    path.write_text(f"task: {name}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n{definition}")
    return path


CHOICE = """output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: choices
doc_to_target: a
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
LAMBADA = """output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}, {metric: acc}]
"""
WIKITEXT = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""


def test_the_suite_of_a_papers_table_gives_each_task_its_metric(model, tmp_path):
    texts = [{"text": "all that is gold does not glitter"}, {"text": "not all those who wander are lost"}]
    questions = [{"q": f"{n} and one is", "choices": [" a long one", f" {n}"], "a": n % 2} for n in range(4)]
    for name, _ in SUITES["fox_table1"]:
        other = {"wikitext": WIKITEXT, "lambada_openai": LAMBADA}.get(name)
        written(tmp_path, name, texts if other else questions, other or CHOICE)
    found = run_harness(asked(model), "fox_table1", data=tmp_path)
    given = [(name, metric) for name, scores in found.scores.items() for metric in scores if "stderr" not in metric]
    assert tuple(given) == SUITES["fox_table1"]
    nats = [[-likelihood(model, encode(q["q"] + c), len(c))[0] for c in q["choices"]] for q in questions]
    plain = sum(n.index(min(n)) == q["a"] for n, q in zip(nats, questions, strict=True)) / 4
    per_letter = [
        [n / len(c) for n, c in zip(row, q["choices"], strict=True)] for row, q in zip(nats, questions, strict=True)
    ]
    normed = sum(n.index(min(n)) == q["a"] for n, q in zip(per_letter, questions, strict=True)) / 4
    assert plain != normed
    assert {found.scores[name]["acc"] for name in ("piqa", "winogrande", "arc_easy", "copa", "sciq", "boolq")} == {
        plain
    }
    assert {found.scores[name]["acc_norm"] for name in ("hellaswag", "arc_challenge", "openbookqa")} == {normed}
    words = sum(len(row["text"].split()) for row in texts)
    total = sum(likelihood(model, [END, *encode(row["text"])], len(row["text"]))[0] for row in texts)
    assert found.scores["wikitext"]["word_perplexity"] == pytest.approx(
        torch.tensor(-total / words).exp().item(), rel=1e-4
    )
    assert found.average == pytest.approx((6 * plain + 3 * normed + found.scores["lambada_openai"]["acc"]) / 10)
    assert lines.harness(found)[-1].split()[:3] == ["average", "of", "accuracies"]
    (tmp_path / "boolq.yaml").unlink()
    with pytest.raises(FileNotFoundError, match="boolq"):
        run_harness(asked(model), "fox_table1", data=tmp_path)


LONG = """output_type: generate_until
doc_to_text: "Answer the question.\\n\\n{{context}}\\n\\nQuestion: {{input}}\\nAnswer:"
doc_to_target: "{{answers}}"
process_results: !function metrics.qa_f1
generation_kwargs: {max_gen_toks: 12, temperature: 1, do_sample: false, until: []}
metric_list: [{metric: score, aggregation: mean, higher_is_better: true}]
"""
METRICS = """
from collections import Counter

def qa_f1(doc, results):
    said = Counter(results[0])
    shared = [sum((said & Counter(answer)).values()) / (len(results[0]) + len(answer)) for answer in doc["answers"]]
    return {"score": 2 * max(shared)}
"""


def test_a_task_of_the_shape_of_longbench_is_generated_after_the_end_of_its_context(model, tmp_path):
    context, questions = "it is said of the fox that " * 30, ["what is x?", "who is y?"]
    texts = []
    for question in questions:
        prompt = encode(f"Answer the question.\n\n{context}\n\nQuestion: {question}\nAnswer:")[12 - 100 :]
        made = model.generate(torch.tensor([prompt]), 12, temperature=0)[0, len(prompt) :].tolist()
        texts.append(decode(made[: made.index(END)] if END in made else made))
    answers = [["no", texts[0]], [texts[1][:5], "none"]]
    rows = [{"input": q, "context": context, "answers": a} for q, a in zip(questions, answers, strict=True)]
    path = written(tmp_path, "longbench_triviaqa", rows, LONG)
    with pytest.raises(FileNotFoundError, match=r"metrics\.py', from which .* takes 'metrics\.qa_f1'"):
        run_harness(asked(model), str(path))
    (tmp_path / "metrics.py").write_text(METRICS)
    found = run_harness(asked(model), str(path), window=100)
    assert len(texts[1]) > 5
    assert found.scores["longbench_triviaqa"]["score"] == pytest.approx((1 + 2 * 5 / (5 + len(texts[1]))) / 2)


def test_lm_evals_own_tasks_have_the_names_and_metrics_of_the_suites():
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders = ["wikitext", "lambada", "piqa", "hellaswag", "winogrande", "arc", "super_glue", "openbookqa", "sciq"]
    found: dict[str, str] = {}
    for path in (path for folder in [*folders, "longbench"] for path in (tasks / folder).rglob("*.yaml")):
        text = path.read_text()
        if name := re.search("^task: (.*)$", text, re.MULTILINE):
            included = re.search("^include: (.*)$", text, re.MULTILINE)
            found[name[1]] = text + (path.with_name(included[1]).read_text() if included else "")
    for name, metric in {column for columns in SUITES.values() for column in columns}:
        assert re.search(rf'metric: "?{metric}"?$', found[name], re.MULTILINE), name
