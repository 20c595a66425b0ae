"""Puts tables and pictures together: one page about everything in a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..spine.files import slug
from ..spine.page import Page, Section
from ..spine.table import Table
from . import figures, standings, tables, texts
from .gather import Gathered, Setting, Texts
from .router_read import TITLE, router_read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAD = (
    "All policies of a table saw the same examples. A block is 64 keys and a tile 64 queries, where a policy's name "
    "does not say otherwise; the budget is in blocks, and what a tile keeps, its tile budget, stands beside it in "
    "brackets. The effective budget is what was measured.",
)
CAPTIONS = {
    "router": TITLE,
    "accuracy": "Accuracy over measured effective budget",
    "split": "Budget and selectivity parts of the router's lift",
    "hits": "Hit rate of gold blocks by layer",
    "triggers": "Share of triggered tiles by layer",
    "kl": "KL to dense over measured effective budget",
}


def page(gathered: Gathered) -> Page:
    """The report."""
    title = f"closecall report: {gathered.source}"
    if not gathered.places:
        return Page(title, gathered.notes, ())
    beating = standings.tables(gathered) if len(gathered.places) > 1 else []
    together = _side_by_side(gathered.settings)

    def heading(model: str) -> str:
        label = gathered.labels.get(model)
        return f"{model}: {label}" if label and label != model else model

    return composed(
        title,
        gathered,
        heading,
        before=[Section("Who beats whom", tables=beating)] if beating else (),
        after=[Section("Models side by side", tables=together)] if together else (),
    )


def composed(
    title: str, gathered: Gathered, heading: Callable[[str], str], *, lead: Sequence[str] = (),
    before: Sequence[Section] = (), after: Sequence[Section] = (),
) -> Page:  # fmt: skip
    """A page with every model's pictures under its heading, then the tables of each of its settings."""
    sections = list(before)
    pictures: dict[str, Figure] = {}
    captions: dict[str, str] = {}
    for model in gathered.models:
        settings, read = gathered.of(model), gathered.texts_of(model)
        made, about = drawn(model, settings, read)
        pictures |= made
        captions |= about
        sections.append(Section(heading(model), figures=list(made)))
        sections += [Section(f"{tables.where(s)}, {s.model}", s.notes, tables.of(s), level=3) for s in settings]
        sections += [Section(f"{tables.where(t)}, {t.model}", t.notes, t.tables, level=3) for t in read]
    return Page(title, (*lead, *LEAD, *gathered.notes), [*sections, *after], pictures, captions)


def drawn(model: str, settings: list[Setting], read: list[Texts]) -> tuple[dict[str, Figure], dict[str, str]]:
    """The pictures and their captions, by file stem."""
    first, last = router_read(model, settings), texts.curve(model, read)
    made = ({"router": first} if first is not None else {}) | figures.of(model, settings)
    made |= {"kl": last} if last is not None else {}
    stems = {kind: f"{kind}-{slug(model)}" for kind in made}
    return {stems[k]: f for k, f in made.items()}, {stems[k]: f"{CAPTIONS[k]}, {model}" for k in made}


def _side_by_side(settings: list[Setting]) -> list[Table]:
    """Makes one table for each task and context that several models have results of."""
    places = dict.fromkeys((s.task, s.context) for s in settings)
    groups = ([s for s in settings if (s.task, s.context) == place and s.findings] for place in places)
    return [tables.side_by_side(group) for group in groups if len(group) > 1]
