"""Tables of results, as text for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """A title, and what a row shows under it; None shows as nothing."""

    title: str
    value: Callable[[dict[str, Any]], Any]
    spec: str = ""
    left: bool = False

    def cell(self, row: dict[str, Any]) -> str:
        value = self.value(row)
        return NOTHING if value is None else format(value, self.spec)


@dataclass(frozen=True)
class Table:
    """`title` says what was measured where, `notes` how to read it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    notes: Sequence[str] = ()

    def shown(self) -> tuple[list[Column], list[list[str]]]:
        """Columns that say something in at least one row."""
        cells = {id(c): [c.cell(row) for row in self.rows] for c in self.columns}
        columns = [c for c in self.columns if any(x != NOTHING for x in cells[id(c)])]
        return columns, [list(line) for line in zip(*(cells[id(c)] for c in columns), strict=True)]

    def text(self) -> str:
        columns, lines = self.shown()
        widths = [max(len(c.title), *(len(line[i]) for line in lines)) for i, c in enumerate(columns)]

        def join(cells: Sequence[str]) -> str:
            padded = (x.ljust(w) if c.left else x.rjust(w) for x, w, c in zip(cells, widths, columns, strict=True))
            return "  ".join(padded).rstrip()

        head = join([c.title for c in columns])
        return "\n".join([self.title, "", head, "-" * len(head), *map(join, lines), "", *self.notes])

    def markdown(self) -> str:
        columns, lines = self.shown()
        rule = ["---" if c.left else "---:" for c in columns]
        body = [f"| {' | '.join(cells)} |" for cells in ([c.title for c in columns], rule, *lines)]
        return "\n".join([f"# {self.title}", "", *body, "", *(f"- {n}" for n in self.notes), ""])
