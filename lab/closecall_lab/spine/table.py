"""Tables of results, as text for a terminal and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "-"
WIDTH = 120  # of lines in a terminal
GAP = "  "
LEAST = 7  # letters of a line in a broken title, unless only fewer make the table fit


@dataclass(frozen=True)
class Column:
    """A title, and what a row shows under it: a function of the row, or a field's name (`spent.mean`; by default the
    title's words, joined by underscores). None shows as nothing."""

    title: str
    value: Callable[[Any], Any] | str = ""
    spec: str = ""
    left: bool = False

    def cell(self, row: Any) -> str:
        value = self.value(row) if callable(self.value) else _field(row, self.value or self.title.replace(" ", "_"))
        return NOTHING if value is None else format(value, self.spec)


def _field(row: Any, path: str) -> Any:
    """A field of a record, of one in it, and so on; None where one on the way is None."""
    for name in path.split("."):
        if row is None:
            return None
        row = row[name] if isinstance(row, dict) else getattr(row, name)
    return row


@dataclass(frozen=True)
class Table:
    """`title` says what was measured where, `notes` how to read it.

    The first `keys` columns name a row: text too wide for a terminal comes in parts, and each part repeats them.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]  # records, or dictionaries
    notes: Sequence[str] = ()
    keys: int = 1

    def shown(self) -> tuple[list[Column], list[list[str]]]:
        """Columns that say something in at least one row."""
        cells = {id(c): [c.cell(row) for row in self.rows] for c in self.columns}
        columns = [c for c in self.columns if any(x != NOTHING for x in cells[id(c)])]
        return columns, [list(line) for line in zip(*(cells[id(c)] for c in columns), strict=True)]

    def text(self, width: int = WIDTH) -> str:
        """Titles of columns are broken between words where that helps; then columns that still do not fit follow
        below."""
        columns, lines = self.shown()
        heads = [[c.title] for c in columns]
        cells = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
        for least in (LEAST, 1):
            if _wide(heads, lines) > width:
                heads = [_broken(c.title, max(n, least)) for c, n in zip(columns, cells, strict=True)]
        widths = [max(map(len, [*head, *(line[i] for line in lines)])) for i, head in enumerate(heads)]
        named = [i for i, c in enumerate(columns) if c in self.columns[: self.keys]]
        body = []
        for part in _parts(widths, named, width) if columns else []:
            deep = max(len(heads[i]) for i in part)
            grid = [[([""] * (deep - len(heads[i])) + heads[i])[k] for i in part] for k in range(deep)]
            above = [_joined(cells, part, widths, columns) for cells in grid]
            rule = "-" * max(map(len, above))
            body += [*above, rule, *(_joined([line[i] for i in part], part, widths, columns) for line in lines), ""]
        return "\n".join([_filled(self.title, width), "", *body, *(_filled(note, width) for note in self.notes)])

    def markdown(self, level: int = 1) -> str:
        """The title is a heading of that level."""
        columns, lines = self.shown()
        rule = ["---" if c.left else "---:" for c in columns]
        body = [f"| {' | '.join(cells)} |" for cells in ([c.title for c in columns], rule, *lines) if columns]
        return "\n".join([f"{'#' * level} {self.title}", "", *body, "", *(f"- {n}" for n in self.notes), ""])


def _filled(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _wide(heads: Sequence[Sequence[str]], lines: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, [*h, *(line[i] for line in lines)])) + len(GAP) for i, h in enumerate(heads)) - len(GAP)


def _broken(title: str, width: int) -> list[str]:
    """A title on as few lines as the width, or its longest word, allows."""
    return textwrap.wrap(title, max(width, *map(len, title.split())), break_long_words=False, break_on_hyphens=False)


def _parts(widths: Sequence[int], keys: Sequence[int], width: int) -> list[list[int]]:
    """Which columns stand side by side: the keys in every part, the others once, as many as fit."""
    room = width - sum(widths[i] + len(GAP) for i in keys)
    parts: list[list[int]] = []
    left = 0
    for i in (i for i in range(len(widths)) if i not in keys):
        if not parts or widths[i] > left:
            parts.append([*keys])
            left = room
        parts[-1].append(i)
        left -= widths[i] + len(GAP)
    return parts or [[*keys]]


def _joined(cells: Sequence[str], part: Sequence[int], widths: Sequence[int], columns: Sequence[Column]) -> str:
    padded = (x.ljust(widths[i]) if columns[i].left else x.rjust(widths[i]) for x, i in zip(cells, part, strict=True))
    return GAP.join(padded).rstrip()
