"""One document, three forms: text for a terminal, Markdown beside its pictures, and HTML that needs no other file."""

from __future__ import annotations

import base64
import html as escaping
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from .table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


WIDTH = 120  # of lines in a terminal
BROAD = 800  # pixels; a picture that is wider at its smallest readable size takes the page's whole width


@dataclass(frozen=True)
class Section:
    """A heading with remarks, tables and pictures (by their file's stem) under it."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[str] = ()
    level: int = 2


@dataclass(frozen=True)
class Page:
    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    captions: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        parts = [textwrap.fill(self.title, WIDTH), "=" * min(len(self.title), WIDTH), *map(_filled, self.lead)]
        for section in self.sections:
            parts += ["", section.title, "-" * len(section.title), *(_filled(f"! {note}") for note in section.notes)]
            parts += [f"\n{table.text()}" for table in section.tables]
        return "\n".join(parts).rstrip() + "\n"

    def markdown(self) -> str:
        parts = [f"# {self.title}", "", *(f"{line}\n" for line in self.lead)]
        for section in self.sections:
            parts += [f"{'#' * section.level} {section.title}", ""]
            parts += [*(f"- **{note}**" for note in section.notes), ""] if section.notes else []
            parts += [f"![{self.captions[stem]}]({stem}.png)\n" for stem in section.figures if stem in self.figures]
            parts += ["#" * section.level + table.markdown() for table in section.tables]
        return "\n".join(parts).rstrip() + "\n"

    def html(self) -> str:
        say = escaping.escape
        links = [
            f'<li class="level{s.level}"><a href="#s{i}">{say(s.title)}</a></li>' for i, s in enumerate(self.sections)
        ]
        body = [f"<h1>{say(self.title)}</h1>", *(f'<p class="lead">{say(line)}</p>' for line in self.lead)]
        body += ["<nav><ul>", *links, "</ul></nav>"] if len(links) > 1 else []
        for i, section in enumerate(self.sections):
            body.append(f'<h{section.level} id="s{i}">{say(section.title)}</h{section.level}>')
            body += [f'<p class="warning">{say(note)}</p>' for note in section.notes]
            pictures = [self._picture(stem) for stem in section.figures if stem in self.figures]
            body += ['<div class="figures">', *pictures, "</div>"] if pictures else []
            body += [_table(table, section.level + 1) for table in section.tables]
        return _HTML.format(title=say(self.title), body="\n".join(body))

    def _picture(self, stem: str) -> str:
        data = base64.b64encode(image(self.figures[stem], "svg")).decode()
        width = round(96 * self.figures[stem].get_size_inches()[0] * 0.8)
        caption = escaping.escape(self.captions[stem], quote=True)
        kind = ' class="broad"' if width > BROAD else ""
        style = f"max-width:{round(1.4 * width)}px"
        return f'<figure{kind}><img src="data:image/svg+xml;base64,{data}" alt="{caption}" style="{style}"></figure>'

    def write(self, out: Path, stem: str) -> list[Path]:
        """Leaves `STEM.md`, `STEM.html` and every picture as PNG and SVG in the directory."""
        out.mkdir(parents=True, exist_ok=True)
        files = {out / f"{stem}.md": self.markdown().encode(), out / f"{stem}.html": self.html().encode()}
        for name, figure in self.figures.items():
            files |= {out / f"{name}.{suffix}": image(figure, suffix) for suffix in ("png", "svg")}
        for path, content in files.items():
            path.write_bytes(content)
        return list(files)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def image(figure: Figure, suffix: str) -> bytes:
    """The same bytes for the same figure: no date, no random names inside."""
    import matplotlib

    made = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "closecall"}):
        figure.savefig(made, format=suffix, metadata={"Date": None} if suffix == "svg" else {"Software": None})
    return made.getvalue()


def _table(table: Table, level: int) -> str:
    say = escaping.escape
    columns, lines = table.shown()
    sides = ["left" if c.left else "right" for c in columns]
    head = "".join(f'<th class="{side}">{say(c.title)}</th>' for c, side in zip(columns, sides, strict=True))
    body = [
        f"<tr>{''.join(f'<td class={side!r}>{say(x)}</td>' for x, side in zip(cells, sides, strict=True))}</tr>"
        for cells in lines
    ]
    notes = "".join(f"<p>{say(note)}</p>" for note in table.notes)
    return (
        f'<section><h{level}>{say(table.title)}</h{level}><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div><div class="notes">{notes}</div></section>'
    )


_HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; --ink: #111827; --quiet: #6b7280; --line: #e5e7eb; --warn: #92400e; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; }}
body {{ max-width: 1600px; margin: 2rem auto; padding: 0 1.5rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 .6rem; }}
h2 {{ font-size: 1.3rem; margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 2px solid var(--ink); }}
h3 {{ font-size: 1.1rem; margin: 2.2rem 0 .6rem; }}
section h3, section h4 {{ font-size: .95rem; margin: 1.4rem 0 .4rem; }}
.lead {{ color: var(--quiet); margin: .2rem 0; max-width: 75ch; }}
nav ul {{ list-style: none; padding: 0; margin: 1.2rem 0; columns: 2; }}
nav .level3 {{ padding-left: 1.2rem; font-size: .93em; }}
nav a {{ color: #1d4ed8; text-decoration: none; }}
nav a:hover {{ text-decoration: underline; }}
.warning {{ background: #fffbeb; color: var(--warn); border-left: 3px solid #f59e0b; }}
.warning {{ padding: .35rem .8rem; margin: .4rem 0; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .26rem .55rem; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th {{ color: var(--quiet); font-weight: 600; border-bottom: 1px solid var(--ink); vertical-align: bottom; }}
tbody tr:hover {{ background: #f9fafb; }}
.left {{ text-align: left; }}
.right {{ text-align: right; }}
.notes {{ color: var(--quiet); font-size: .8rem; margin: .4rem 0 0; max-width: 110ch; }}
.notes p {{ margin: .1rem 0; }}
.figures {{ display: grid; gap: 1.2rem 2rem; margin: 1.2rem 0; align-items: start; }}
figure {{ margin: 0; min-width: 0; }}
img {{ width: 100%; height: auto; }}
@media (min-width: 1100px) {{ .figures {{ grid-template-columns: 1fr 1fr; }} .broad {{ grid-column: 1 / -1; }} }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
