"""The page: one HTML file that needs no other. The template, its style and its scripts are files of their own."""

from __future__ import annotations

import base64
import hashlib
import html as escaping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..spine import files
from .gather import Gathered
from .pack import LIMIT, data

TEMPLATE = Path(__file__).parent / "template"
STYLE = "page.css"
SCRIPTS = ("data.js", "state.js", "colour.js", "map.js", "panels.js", "main.js")  # in this order, one after the other
FRAME = (
    '<iframe title="closecall explain" sandbox="allow-scripts" srcdoc="{page}" '
    'style="width:100%;height:{height}px;border:1px solid #8884;border-radius:6px"></iframe>'
)


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a prompt's attention kept, dropped and nearly kept. `save` it as a page, or let a notebook show it."""

    gathered: Gathered = field(repr=False)
    limit: int = LIMIT

    @cached_property
    def data(self) -> dict[str, Any]:
        """All that the page shows, as it is packed into it."""
        return data(self.gathered, limit=self.limit, beside=sum(path.stat().st_size for path in TEMPLATE.iterdir()))

    @property
    def sentences(self) -> list[str]:
        """The plain sentences at the top of the page."""
        told = [text for made in self.data["policies"] for text in made["sentences"]]
        return [*told, *self.data["remarks"]]

    def html(self) -> str:
        return _render(self.data)

    def save(self, path: str | Path) -> Path:
        """Writes the page; opens from disk, without a network."""
        return files.write(Path(path), self.html())

    def _repr_html_(self, height: int = 900) -> str:
        return FRAME.format(page=escaping.escape(self.html(), quote=True), height=height)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def _render(data: dict[str, Any]) -> str:
    """The prompt's text is data, or escaped; the policy that browsers are given runs no script but ours."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    style = (TEMPLATE / STYLE).read_text(encoding="utf-8")
    script = "\n".join((TEMPLATE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    allowed = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html.j2").render(
        data=data, policies=data["policies"], style=Markup(style), script=Markup(script), allowed=Markup(allowed)
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
