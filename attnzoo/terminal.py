"""What the commands print with."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def new_table(*columns: str, numbers: Collection[str] = (), prose: Collection[str] = ()) -> Table:
    """Columns of which ``numbers`` are set to the right, and ``prose`` alone breaks into lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left")
    for name in columns:
        side: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=side, no_wrap=name not in prose, overflow="fold")
    return table


def print_table(table: Table, to: Console) -> None:
    """Print it whole: in a terminal that is too narrow its rows go on in the next line, and no number is cut."""
    unlimited = to.options.update(max_width=sys.maxsize)
    for column in table.columns:
        if column.no_wrap:  # rich takes the longest word for the least width of a cell
            cells = (column.header, *column.cells)
            column.min_width = max(to.measure(cell, options=unlimited).maximum for cell in cells)
    least = to.measure(table, options=unlimited).minimum
    table.width = least if least > to.width else None
    to.print(table, crop=False)


def console() -> Console:
    """Standard output; a reader who goes is an error that click knows."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # for click to see

    return Plain(highlight=False)
