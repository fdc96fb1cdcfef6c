"""The tables of a paper as suites of lm-eval's tasks, each task with the metric that the table prints."""

from __future__ import annotations

# Lin et al., 2025 (FoX), tables 1, 7 and 2, from left to right, all without examples; the short tasks and their metrics
# as in the authors' eval/lm_eval_harness/table_lm_eval.py.
_SHORT = (
    ("wikitext", "word_perplexity"), ("lambada_openai", "perplexity"), ("lambada_openai", "acc"), ("piqa", "acc"),
    ("hellaswag", "acc_norm"), ("winogrande", "acc"), ("arc_easy", "acc"), ("arc_challenge", "acc_norm"),
)  # fmt: skip
_LONG = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "trec", "triviaqa", "samsum", "lcc", "repobench-p",
)  # fmt: skip
SUITES: dict[str, tuple[tuple[str, str], ...]] = {
    "fox_table1": (*_SHORT, ("copa", "acc"), ("openbookqa", "acc_norm"), ("sciq", "acc"), ("boolq", "acc")),
    "fox_table7": _SHORT,
    "fox_table2": tuple((f"longbench_{name}", "score") for name in _LONG),
}
AVERAGED = ("acc", "acc_norm")  # the metrics of which a table prints the average
