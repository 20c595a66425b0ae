"""The models we know, by name. Each is one file in `known/`, found by scanning."""

from __future__ import annotations

import importlib
import pkgutil

from ..registry import unknown
from . import known
from .entry import Entry, Shape
from .source import Source


def _scan() -> tuple[Entry, ...]:
    """All entries: those that `closecall get` fetches first, then the paper's, then the others."""
    names = sorted(module.name for module in pkgutil.iter_modules(known.__path__))
    entries = [importlib.import_module(f"{known.__name__}.{name}").ENTRY for name in names]
    return tuple(sorted(entries, key=lambda entry: (entry.source is None, not entry.in_paper, entry.name)))


PANEL: tuple[Entry, ...] = _scan()

SHAPES: dict[str, Shape] = {known_shape.name: known_shape for entry in PANEL if (known_shape := entry.shape)}


def names() -> tuple[str, ...]:
    return tuple(entry.name for entry in PANEL)


def find(name: str) -> Entry | None:
    """The entry of that name or hub id, if there is one. Case does not matter."""
    wanted = name.lower()
    return next((entry for entry in PANEL if wanted in (entry.name, entry.hub_id.lower())), None)


def get(name: str) -> Entry:
    entry = find(name)
    if entry is None:
        raise unknown("model", name, names())
    return entry


def shape(name: str) -> Shape:
    """The dimensions of a model, by its name, its hub id, or the hub id's last part. Case does not matter."""
    wanted = name.lower()
    for known_shape in SHAPES.values():
        if wanted in (known_shape.name, known_shape.hub_id.lower(), known_shape.hub_id.lower().split("/")[-1]):
            return known_shape
    raise unknown("model shape", name, SHAPES)


def sources() -> dict[str, Source]:
    """What `closecall get` can fetch, by name."""
    return {entry.name: entry.source for entry in PANEL if entry.source is not None}
