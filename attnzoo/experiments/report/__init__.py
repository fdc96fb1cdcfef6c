"""Self-contained HTML pages about several runs, with style, figures and script inside."""

from attnzoo.experiments.report.page import render, terminal_table, write_report
from attnzoo.experiments.report.results import Facts, RunResult, load_result, save_result

__all__ = ["Facts", "RunResult", "load_result", "render", "save_result", "terminal_table", "write_report"]
