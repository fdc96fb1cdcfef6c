"""A row of a task to look at."""

from __future__ import annotations

from collections.abc import Iterator

from attnzoo.data.tasks.task import UNASKED, Row, Task


def row_lines(task: Task, row: Row, width: int) -> Iterator[list[tuple[str, bool]]]:
    """A row's words in lines, each behind the number of its first token: pieces of text, and whether something is asked
    there, as in `r>0`, where 0 is asked at r.

    Args:
        task: the row is of it.
        row: tokens and targets.
        width: columns that a line may have, if there is room for one word.
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
