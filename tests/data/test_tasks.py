"""Synthetic tasks: every answer is the one that follows from the row, and a row follows from its index."""

from itertools import permutations

import numpy as np
import pytest
import tiny_runs
from tiny_runs import StoppedError, numbers, outcome, stop_at

from attnzoo.config import DataConfig, WeightedSource, load_config
from attnzoo.data import build_data
from attnzoo.data.tasks import TASKS, Examples, build_task
from attnzoo.data.tasks.recall import draw_different
from attnzoo.training import CheckpointError, train

NOTHING = None

# Each answerer takes the words of a row and the options, and says what is asked at each word; it knows the task's
# definition alone. The words are those that `attnzoo data show` prints.


def flip_flop(row, p_ignore=0.8):
    assert row[0] == "w"
    assert row[-2] == "r"
    bit, answers = "", []
    for kind, said in zip(row[::2], row[1::2], strict=True):
        bit = said if kind == "w" else bit
        answers += [bit if kind == "r" else NOTHING, NOTHING]
        assert kind != "r" or said == bit
    return answers


def parity(row, last_only=False):
    ones = ["01"[row[: t + 1].count("1") % 2] for t in range(len(row))]
    return [NOTHING] * (len(row) - 1) + ones[-1:] if last_only else ones


def word_problem(row, group="S5", tokens=None):
    assert tokens is None or len(set(row)) == tokens
    things = list(range(int(group[1])))
    answers = []
    for word in row:
        things = [int(word[thing]) for thing in things]
        answers.append("".join(map(str, things)))
    return answers


def mqar(row, pairs=4, power=0.01, vocab_size=8192):
    return forgetting_mqar(row, pairs, 0)


def forgetting_mqar(row, pairs=8, updates=4, power=0.01, vocab_size=8192):
    first, known = {}, {}
    for t in range(0, 2 * (pairs + updates), 2):
        first.setdefault(row[t], row[t + 1])
        known[row[t]] = row[t + 1]
    assert len(known) == pairs
    assert sum(first[key] != known[key] for key in known) == updates
    return questions(row, 2 * (pairs + updates), known)


def nth_last_value(row, keys=4, values=3, n=2, power=0.01, vocab_size=8192):
    known = {}
    for t in range(0, 2 * keys * values, 2):
        known.setdefault(row[t], []).append(row[t + 1])
    return questions(row, 2 * keys * values, {key: given[-n] for key, given in known.items()})


def questions(row, start, known):
    """What stands at every second word may be noise that looks like a key: it is asked where the row asks."""
    return [known.get(word, NOTHING) if t >= start and (t - start) % 2 == 0 else NOTHING for t, word in enumerate(row)]


def selective_copying(row, vocab_size=16, count=16):
    said = [word for word in row[:-count] if word != "."]
    assert len(said) == count
    assert set(row[-count:]) == {"?"}
    return [NOTHING] * (len(row) - count) + said


def induction(row, vocab_size=16, questions=1):
    places = [t for t, word in enumerate(row) if word == "!"]
    assert 2 <= len(places) <= questions + 1
    assert places[-1] == len(row) - 1
    said = dict(zip(places[1:], (row[t + 1] for t in places), strict=False))
    assert "!" not in said.values()
    return [said.get(t, NOTHING) for t in range(len(row))]


def needle(row, mode="standard", digits=4, depth=None):
    start = row.index("fact" if mode == "standard" else "answer")
    return at_end(row, row[start + 1 : start + 1 + digits])


def several_keys(row, needles=4, digits=4, keys=1024):
    facts = [t for t, word in enumerate(row) if word == "fact"]
    assert len({row[t + 1] for t in facts}) == needles
    key = row[row.index("question") + 1]
    (found,) = [row[t + 2 : t + 2 + digits] for t in facts if row[t + 1] == key]
    return at_end(row, found)


def variable_tracking(row, chains=1, hops=4, names=256, values=256):
    value_of, found, asked_for = {}, [], row[row.index("question") + 1]
    for t, word in enumerate(row):
        if word == "fact":
            name, source = row[t + 1 : t + 3]
            value_of[name] = value_of[source] if source.startswith("x") else source
            found += [name] if value_of[name] == asked_for else []
    assert len(value_of) == chains * (hops + 1)
    assert len(set(value_of.values())) == chains
    assert len(found) == hops + 1
    return at_end(row, found)


def common_words(row, words=2048, common=10, often=30, seldom=3):
    hay = row[: row.index("question")]
    found = [word for word in dict.fromkeys(hay) if hay.count(word) == often]
    assert len(found) == common
    assert all(hay.count(word) <= seldom for word in set(hay) - set(found))
    return at_end(row, found)


def frequent_words(row, words=2048, alpha=2.0, count=3):
    hay = [word for word in row[: row.index("question")] if word != "w0"]
    counts = sorted(((hay.count(word), word) for word in set(hay)), reverse=True)
    assert len({number for number, _ in counts[: count + 1]}) == count + 1
    whole = row.index("question") / sum(rank**-alpha for rank in range(1, words + 1))
    assert [number for number, _ in counts[:count]] == [int(whole * rank**-alpha) for rank in range(2, count + 2)]
    return at_end(row, [word for _, word in counts[:count]])


def at_end(row, answers):
    assert row[len(row) - len(answers) + 1 :] == answers[:-1]
    return [NOTHING] * (len(row) - len(answers)) + answers


CASES = [
    ("flip_flop", {}, 64), ("flip_flop", {"p_ignore": 0.98}, 512), ("flip_flop", {"p_ignore": 0.1}, 4),
    ("parity", {}, 33), ("parity", {"last_only": True}, 40),
    *(("word_problem", {"group": group}, 128) for group in ("S3", "S4", "S5", "A4", "A5")),
    ("word_problem", {"group": "A5", "tokens": 3}, 64),
    ("mqar", {}, 64), ("mqar", {"pairs": 16, "power": 1.0}, 64), ("mqar", {"vocab_size": 20, "pairs": 8}, 47),
    ("forgetting_mqar", {}, 64), ("forgetting_mqar", {"updates": 8, "vocab_size": 20}, 50),
    ("nth_last_value", {}, 64), ("nth_last_value", {"n": 3, "vocab_size": 12}, 33), ("nth_last_value", {"n": 1}, 40),
    ("selective_copying", {}, 64), ("selective_copying", {"count": 3, "vocab_size": 4}, 6),
    ("induction", {}, 30), ("induction", {"vocab_size": 2}, 3),
    ("induction", {"questions": 8}, 30), ("induction", {"questions": 4}, 9),
    ("needle", {}, 40), ("needle", {"mode": "easy"}, 12), ("needle", {"depth": 0.0}, 40), ("needle", {"digits": 1}, 5),
    ("several_keys", {}, 40), ("several_keys", {"needles": 8, "keys": 8, "digits": 1}, 64),
    ("variable_tracking", {}, 64), ("variable_tracking", {"chains": 3, "hops": 2, "names": 9, "values": 3}, 40),
    ("common_words", {}, 400), ("common_words", {"common": 3, "often": 4, "seldom": 2, "words": 20}, 37),
    ("frequent_words", {}, 300), ("frequent_words", {"count": 2, "words": 30}, 128),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "length"), CASES, ids=lambda x: str(x))
def test_every_answer_follows_from_the_row(name, options, length):
    task = build_task(name, options)
    examples = Examples(task, length, seed=5)
    for index in range(60):
        tokens, targets = examples[index]
        assert tokens.shape == targets.shape == (length,)
        assert tokens.dtype == targets.dtype == np.int64
        assert (targets != -100).any()
        assert tokens.min() >= 0
        assert tokens.max() < len(task.words)
        expected = globals()[name]([task.words[token] for token in tokens], **options)
        given = [NOTHING if target == -100 else task.words[target] for target in targets]
        if name in ("mqar", "forgetting_mqar", "nth_last_value"):  # noise may look like a key that is asked
            expected = [NOTHING if answer is NOTHING else right for answer, right in zip(given, expected, strict=True)]
            keys = [token for token, answer in zip(tokens, given, strict=True) if answer is not NOTHING]
            assert len(set(keys)) == len(keys) == options.get("pairs", options.get("keys", len(keys)))
        assert given == expected


def test_every_task_is_checked():
    assert {name for name, _, _ in CASES} == set(TASKS)


@pytest.mark.parametrize("p_ignore", [0.1, 0.8, 0.98])
def test_flip_flop_ignores_as_often_as_it_is_told(p_ignore):
    tokens = np.concatenate(
        [Examples(build_task("flip_flop", {"p_ignore": p_ignore}), 512)[i][0][2:-2] for i in range(60)]
    )
    n = len(tokens) / 2
    kinds = np.bincount(tokens[::2], minlength=3) / n
    expected = np.array([(1 - p_ignore) / 2, p_ignore, (1 - p_ignore) / 2])
    assert (np.abs(kinds - expected) < 4 * np.sqrt(expected * (1 - expected) / n)).all()
    free = tokens[1::2][tokens[::2] != 2]
    assert abs((free == 4).mean() - 0.5) < 2 / np.sqrt(len(free))


def agrees(seen, shares):
    """Whether numbers seen in 0, 1, ... come with these shares, by the sum of chi^2 (5 deviations above its mean)."""
    expected = len(seen) * np.asarray(shares) / np.sum(shares)
    chi = ((np.bincount(seen, minlength=len(expected)) - expected) ** 2 / expected).sum()
    return chi < len(expected) + 5 * np.sqrt(2 * len(expected))


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_questions_and_noise_lie_where_the_definition_says(power):
    rows = [Examples(build_task("mqar", {"vocab_size": 8, "pairs": 1, "power": power}), 34)[i] for i in range(500)]
    asked = np.array([np.flatnonzero(targets != -100)[0] for _, targets in rows])
    places = np.arange(1, 17.0)
    assert agrees((asked - 2) // 2, places ** (power - 1))
    assert not agrees((asked - 2) // 2, places ** (power - 1.5))
    assert agrees(np.concatenate([tokens[3::2] for tokens, _ in rows]), np.ones(8))
    for name, options, alike in (
        ("parity", {}, 2), ("word_problem", {"group": "S3"}, 6), ("nth_last_value", {"vocab_size": 12}, 12),
    ):  # fmt: skip
        task = build_task(name, options)
        start = 32 if name == "nth_last_value" else 0
        assert agrees(np.concatenate([Examples(task, 65)[i][0][start + 1 :: 2] for i in range(40)]), np.ones(alike))
    rows = [Examples(build_task("induction", {"questions": 4}), 16)[i][0] for i in range(400)]
    assert agrees(np.array([(row == 0).sum() - 2 for row in rows]), np.ones(4))
    for name, first in (("selective_copying", 2), ("induction", 0)):
        rows = [Examples(build_task(name), 64)[i][0] for i in range(400)]
        where = [np.flatnonzero(row[:48] >= 2) if first else np.flatnonzero(row[:62] == 0) for row in rows]
        assert agrees(np.concatenate(where), np.ones(48 if first else 62))


def test_different_places_are_drawn_as_numpy_draws_them():
    for seed in range(200):
        count, N = 1 + seed % 7, 7 + seed % 30
        weights = np.random.default_rng([seed]).random(N) ** (1 + seed % 20)
        p = weights / weights.sum()
        ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
        assert draw_different(ours, count, p).tolist() == theirs.choice(N, count, replace=False, p=p).tolist()
        assert ours.random() == theirs.random()


def test_chains_of_variables_stand_between_each_other():
    task, apart = build_task("variable_tracking", {"chains": 2, "hops": 2}), 0
    for index in range(20):
        row = [task.words[token] for token in Examples(task, 40)[index][0]]
        values = {}
        for t, word in enumerate(row):
            if word == "fact":
                values[row[t + 1]] = values.get(row[t + 2], row[t + 2])
        apart += list(values.values()) != sorted(values.values(), key=list(values.values()).index)
    assert 10 < apart < 20


def test_groups_are_closed_and_of_their_sizes():
    for group, size in [("S3", 6), ("S4", 24), ("S5", 120), ("A4", 12), ("A5", 60)]:
        words = build_task("word_problem", {"group": group}).words
        assert len(set(words)) == size
        assert {"".join(b[int(i)] for i in a) for a in words for b in words} == set(words)
        assert set(words) <= {"".join(p) for p in permutations("01234"[: int(group[1])])}


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_few_elements_make_the_whole_group(tokens):
    task = build_task("word_problem", {"group": "A5", "tokens": tokens})
    rows = [Examples(task, 400)[i] for i in range(5)]
    used = set(np.concatenate([row for row, _ in rows]).tolist())
    assert len(used) == tokens
    assert set(np.concatenate([answers for _, answers in rows]).tolist()) == set(range(60))


def test_needle_lies_at_its_depth():
    for depth in (0.0, 0.25, 1.0):
        task = build_task("needle", {"depth": depth})
        row = [task.words[token] for token in Examples(task, 110)[3][0]]
        assert row.index("fact") == depth * 100


@pytest.mark.parametrize("name", TASKS)
def test_row_depends_on_seed_index_and_side_alone(name):
    task = build_task(name)
    one, again = (Examples(build_task(name), task.length, seed=3) for _ in range(2))
    for x, y in zip(one.batch([7, 2]), again.batch(range(8)), strict=True):
        np.testing.assert_array_equal(x, y[[7, 2]])
    others = [one[3], Examples(task, task.length, 4)[2], Examples(task, task.length, 3, held_out=True)[2]]
    assert all((tokens != one[2][0]).any() for tokens, _ in others)


def test_rows_of_either_side_are_equal_only_where_rows_are_short():
    for length, most in ((16, True), (32, False)):
        task = build_task("flip_flop", {})
        train, held = (
            {rows.tobytes() for rows in Examples(task, length, held_out=side).batch(range(count))[0]}
            for side, count in ((False, 20_000), (True, 256))
        )
        assert (len(held & train) > len(held) / 2) if most else not held & train


def test_data_of_a_task():
    config = DataConfig(source="task:flip_flop", task_options={"p_ignore": 0.5}, context_length=16, seed=2)
    data = build_data(config)
    assert data.vocab_size == 5
    assert (data.train[0][0] != data.heldout[0][0]).any()
    for changed in ({"seed": 3}, {"task_options": {}}, {"context_length": 18}):
        assert build_data(DataConfig(**{**vars(config), **changed})).fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "task:flipflop"}, "unknown task 'flipflop'.*did you mean 'flip_flop'.*, or a Python file"),
        ({"source": "task:mine.py"}, "unknown task 'mine.py'.*file, of which there is none of that path from here"),
        ({"source": "flip_flop"}, "did you mean 'task:flip_flop'"),
        ({"task_options": {"p_ignor": 0.5}}, "p_ignor.*did you mean 'p_ignore'"),
        ({"task_options": {"p_ignore": "often"}}, "p_ignore: expected a number"),
        ({"task_options": {"p_ignore": 1.5}}, "p_ignore: expected 0 to 1, got 1.5"),
        ({"source": "task:word_problem", "task_options": {"group": "S6"}}, "unknown group 'S6'"),
        ({"source": "task:word_problem", "task_options": {"tokens": 1}}, "tokens: expected 2 to 120, got 1"),
        ({"source": "task:needle", "task_options": {"mode": "hard"}}, "unknown mode 'hard'"),
        ({"source": "task:frequent_words"}, "data.context_length=16.*length: expected more tokens"),
        ({"source": "task:mqar", "task_options": {"pairs": 5}}, "context_length=16.*expected at least 20 tokens"),
        ({"source": "task:nth_last_value", "task_options": {"keys": 4000, "values": 2**20}}, "expected at least 8388"),
        ({"source": "task:several_keys", "task_options": {"digits": 2**16}}, "expected at least 327689 tokens"),
        ({"context_length": 15}, "expected an even number"),
        ({"vocab_size": 4}, "data.vocab_size=4.*5 tokens"),
        ({"source": "stdlib", "task_options": {"p_ignore": 0.5}}, "task_options: expected a source that begins"),
        ({"documents": "packed"}, "documents='packed'"),
        ({"heldout_source": "x"}, "heldout_source='x'"),
        ({"source": "stdlib", "sources": [WeightedSource("task:parity")]}, "data.source alone"),
    ],
)  # fmt: skip
def test_mistake_is_named(settings, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build_data(DataConfig(**{"source": "task:flip_flop", "context_length": 16, **settings}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return asked(tokens, [0], [n])", r"expected answers from 0 to 3, got 4 to 4"),
        ("return asked(tokens - 1, [0], [1])", r"expected tokens from 0 to 3, got -1 to -1"),
        ("return asked(tokens, [], [])", r"expected answers from 0 to 3, got none"),
        ("return tokens, tokens[:2]", r"expected tokens and targets, int64 \[8\] each, got int64 \[8\], int64 \[2\]"),
        ("return tokens / 2, tokens", r"got float64 \[8\], int64 \[8\]"),
        ("return asked(tokens, [0], [1])", ""),
    ],
)
def test_rows_of_somebody_s_own_task_are_checked(body, message, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import numpy as np\nfrom attnzoo.data.tasks import Task, asked\n\ndef TASK(n: int = 4):\n"
        f"    def draw(random, T):\n        tokens = np.zeros(T, dtype=np.int64)\n        {body}\n"
        "    return Task('abcd'[:n], draw, 8)\n"
    )
    config = DataConfig(source=f"task:{path}", context_length=8)
    if message:
        with pytest.raises(ValueError, match=rf"own\.py: .*{message}"):
            build_data(config)
    else:
        assert build_data(config).vocab_size == 4
        assert build_data(DataConfig(**{**vars(config), "task_options": {"n": 2}})).vocab_size == 2
        with pytest.raises(ValueError, match=r"unknown option 'm' of the task '.*own\.py': expected one of n"):
            build_task(str(path), {"m": 1})
        with pytest.raises(ValueError, match="n: expected a whole number"):
            build_task(str(path), {"n": "two"})


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "expected a function as TASK, got None"), ("TASK = lambda: 1", "expected TASK to give a Task, got 1")],
)
def test_file_without_a_task_is_named(text, message, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(TypeError, match=rf"own\.py: {message}"):
        build_task(str(path))


def config_of(folder, run, *overrides):
    source = (f"output_dir={folder / run}", "data.source=task:flip_flop", "data.task_options.p_ignore=0.5")
    return load_config(None, [*source, *tiny_runs.SMALL, "model.vocab_size=5", "batch_size=4", *overrides])


def test_run_goes_on_exactly(tmp_path):
    whole = config_of(tmp_path, "whole")
    train(whole)
    stopped = config_of(tmp_path, "stopped")
    with pytest.raises(StoppedError):
        train(stopped, on_row=stop_at(5))
    train(stopped)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "stopped")
    with pytest.raises((CheckpointError, ValueError), match="p_ignore"):
        train(config_of(tmp_path, "whole", "data.task_options.p_ignore=0.6"))


def test_parts_of_a_step_train_what_the_whole_step_trains(tmp_path):
    """Rows have different numbers of answers, and every answer counts the same."""
    for run, parts in [("one", 1), ("four", 4)]:
        train(config_of(tmp_path, run, f"gradient_accumulation={parts}"))
    for one, four in zip(numbers(tmp_path / "one"), numbers(tmp_path / "four"), strict=True):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_answers_alone_are_learned(tmp_path):
    """A tiny recurrence learns what the last bit was where little is ignored."""
    train(
        config_of(
            tmp_path, "learned", "data.task_options.p_ignore=0.1", "steps=100", "batch_size=16", "eval_every=0",
            "checkpoint_every=0", "model.attention=mamba2", "eval_tokens=1600", "log_every=50",
        )
    )  # fmt: skip
    assert numbers(tmp_path / "learned")[-1]["loss"] < 0.3
