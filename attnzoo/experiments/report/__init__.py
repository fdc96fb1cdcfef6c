"""One HTML page about several runs: style, figures and script are all inside it, nothing is loaded."""

from attnzoo.experiments.report.page import render, terminal_table, write_report
from attnzoo.experiments.report.results import Facts, RunResult, load_result, save_result

__all__ = ["Facts", "RunResult", "load_result", "render", "save_result", "terminal_table", "write_report"]
