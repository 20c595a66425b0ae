"""One document, three forms: text for a terminal, Markdown beside its pictures, and HTML that needs no other file."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .figure import image, save
from .table import WIDTH, Table

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

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
            parts += [table.markdown(section.level + 1) for table in section.tables]
        return "\n".join(parts).rstrip() + "\n"

    def html(self) -> str:
        pictures = {stem: _picture(figure) for stem, figure in self.figures.items()}
        return _templates().get_template("page.html").render(page=self, pictures=pictures)

    def write(self, out: Path, stem: str) -> list[Path]:
        """Leaves `STEM.md`, `STEM.html` and every picture as PNG and SVG in the directory."""
        pages = {".md": self.markdown(), ".html": self.html()}
        return [files.write(out / f"{stem}{suffix}", text) for suffix, text in pages.items()] + save(self.figures, out)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH)


def _picture(figure: Figure) -> dict[str, Any]:
    """What the template shows of a picture; it may grow a little past its smallest readable size."""
    width = round(96 * figure.get_size_inches()[0] * 0.8)
    data = base64.b64encode(image(figure, "svg")).decode()
    return {"data": data, "width": round(1.4 * width), "broad": width > BROAD}


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("closecall_lab.spine")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
