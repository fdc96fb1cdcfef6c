"""A row of a task in print."""

from __future__ import annotations

from collections.abc import Iterator

from attnzoo.data.tasks.task import UNASKED, Row, Task


def row_lines(task: Task, row: Row, width: int) -> Iterator[list[tuple[str, bool]]]:
    """The words of a row in lines that begin with the index of their first token.

    A line is a list of pieces of text, each with whether an answer is asked there; `r>0` asks for 0 at r.

    Args:
        task: the row's task.
        row: tokens and targets.
        width: the most columns of a line, unless one word is longer.
    """
    cells = [
        task.words[token] + ("" if target == UNASKED else f">{task.words[target]}")
        for token, target in zip(*(side.tolist() for side in row), strict=True)
    ]
    number, cell = len(str(len(cells))), max(map(len, cells))
    columns = max(1, (width - number - 2) // (cell + 1))
    if columns > 8:
        columns -= columns % 8
    for first in range(0, len(cells), columns):
        line = [(f"{first:>{number}}  ", False)]
        for index in range(first, min(first + columns, len(cells))):
            line.append((cells[index].ljust(cell + 1), bool(row[1][index] != UNASKED)))
        yield line
