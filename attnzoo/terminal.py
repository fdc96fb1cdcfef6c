"""Tables, wrapped text and the console of the commands."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def new_table(*columns: str, numbers: Collection[str] = (), prose: Collection[str] = ()) -> Table:
    """A table in which ``numbers`` columns are right-aligned, and only ``prose`` columns wrap."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left")
    for name in columns:
        side: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=side, no_wrap=name not in prose, overflow="fold")
    return table


def print_table(table: Table, to: Console) -> None:
    """Print a table without truncation; in a narrow terminal rows continue on the next line."""
    unlimited = to.options.update(max_width=sys.maxsize)
    for column in table.columns:
        if column.no_wrap:  # rich's least width of a cell is its longest word
            cells = (column.header, *column.cells)
            column.min_width = max(to.measure(cell, options=unlimited).maximum for cell in cells)
    least = to.measure(table, options=unlimited).minimum
    table.width = least if least > to.width else None
    with to.capture() as printed:
        to.print(table, crop=False)
    # blanks at the end of a line that just fits would begin another
    lines = re.sub(r"(?m)(?: |\x1b\[[0-9;]*m)+$", lambda end: "\x1b[0m" if "\x1b" in end[0] else "", printed.get())
    to.out(lines, highlight=False, end="")


def columns(most: int = 80) -> int:
    """The columns of the terminal, at most ``most``; ``most`` where the output goes elsewhere."""
    return min(most, shutil.get_terminal_size((most, 24)).columns)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a paragraph, broken between words alone, with a hanging indent."""
    hanging = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, width, subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False)


def fitted(text: str, most: int = sys.maxsize) -> str:
    """A paragraph in lines of :func:`columns`."""
    return "\n".join(wrapped(text, columns(most)))


def console() -> Console:
    """The console on standard output; a closed pipe raises an error that click handles."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # click handles it

    return Plain(highlight=False)
