"""Real text that is on any Debian machine with Python: source code, manuals, docstrings, licences, JSON.

Which files, exactly (`Corpus.files` lists them, `Corpus.sha256` is a hash of all their text):

code        the modules `*.py` at the top of Python's standard library, as they are
manuals     the language reference that `help()` prints: `pydoc_data/topics.py`, topic by topic
docstrings  every docstring of 200 characters or more in those modules and in the packages of the standard library
licences    the files of /usr/share/common-licenses that are no links, which Debian's base-files installs
json        a record for every named character of Python's `unicodedata` but ideographs and Hangul, as JSON lines

Another release of Python has other text: results say which one, by the hash.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import random
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from closecall.registry import unknown

from .example import JSON

LICENCES = Path("/usr/share/common-licenses")
SHORTEST_DOCSTRING = 200
RECORDS = 64  # of JSON make one text
ORDER = "closecall"  # seeds the order of a corpus' files, which is the same everywhere
TESTS = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """Texts by name, in a fixed order that has nothing to do with the alphabet."""

    kind: str
    texts: tuple[tuple[str, str], ...]

    @property
    def files(self) -> list[str]:
        return [name for name, _ in self.texts]

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()

    @cached_property
    def paragraphs(self) -> tuple[str, ...]:
        """The texts' paragraphs, those between blank lines, in order."""
        pieces = (piece.strip("\n") for _, text in self.texts for piece in text.split("\n\n"))
        return tuple(piece for piece in pieces if piece.strip())

    @property
    def facts(self) -> Mapping[str, JSON]:
        python = platform.python_version()
        return {"corpus": self.kind, "files": len(self.texts), "sha256": self.sha256, "python": python}


def of_files(path: str) -> Corpus:
    """The text of a file, or of every file in a directory."""
    root = Path(path).expanduser()
    paths = sorted(p for p in root.glob("*") if p.is_file()) if root.is_dir() else [root]
    if not paths:
        raise ValueError(f"there is no file in {root}: name a text file, or a directory of them")
    return Corpus(path, tuple((file.name, _read(file)) for file in paths))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}. Name a text file or a directory") from None


def library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=2)
def modules(*, packages: bool = False) -> dict[str, str]:
    """The sources of the standard library's modules, and of its packages' if asked for, by their path in it."""
    root = library()
    paths = sorted(root.glob("*.py")) + (sorted(root.glob("*/**/*.py")) if packages else [])
    kept = (p for p in paths if not set(p.relative_to(root).parts) & set(TESTS))
    found = {str(p.relative_to(root)): p.read_text(encoding="utf-8", errors="replace") for p in kept}
    if not found:
        raise ValueError(f"no sources of Python's standard library in {root}: install them, or use another haystack")
    return {name: text for name, text in found.items() if not name.startswith(("pydoc_data", "_sysconfigdata"))}


def _code() -> Iterator[tuple[str, str]]:
    return iter(modules().items())


def _manuals() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    return ((f"pydoc_data/topics.py:{name}", text.strip("\n")) for name, text in sorted(topics.items()))


def _docstrings() -> Iterator[tuple[str, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, source in modules(packages=True).items():
        nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
        texts = [text for node in nodes if (text := ast.get_docstring(node)) and len(text) >= SHORTEST_DOCSTRING]
        if texts:
            yield name, "\n\n".join(texts)


def _licences() -> Iterator[tuple[str, str]]:
    paths = sorted(p for p in LICENCES.glob("*") if p.is_file() and not p.is_symlink())
    if not paths:
        raise ValueError(f"no licences in {LICENCES}: it comes with Debian's base-files; use another kind of text")
    return ((str(p), p.read_text(encoding="utf-8", errors="replace")) for p in paths)


def _records() -> Iterator[str]:
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if name:
            yield json.dumps(
                {
                    "code": f"U+{code:04X}",
                    "name": name,
                    "category": unicodedata.category(chr(code)),
                    "bidirectional": unicodedata.bidirectional(chr(code)),
                    "decomposition": unicodedata.decomposition(chr(code)) or None,
                    "numeric": unicodedata.numeric(chr(code), None),
                }
            )


def _json() -> Iterator[tuple[str, str]]:
    lines = [line for line in _records() if "IDEOGRAPH" not in line and "HANGUL SYLLABLE" not in line]
    for first in range(0, len(lines), RECORDS):
        yield f"unicodedata {unicodedata.unidata_version}, records {first}", "\n".join(lines[first : first + RECORDS])


_SOURCES: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "code": _code,
    "manuals": _manuals,
    "docstrings": _docstrings,
    "licences": _licences,
    "json": _json,
}
KINDS = tuple(_SOURCES)


@lru_cache(maxsize=len(KINDS))
def corpus(kind: str) -> Corpus:
    """All the text of that kind on this machine."""
    if kind not in _SOURCES:
        raise unknown("kind of text", kind, KINDS)
    texts = sorted(_SOURCES[kind]())
    random.Random(ORDER).shuffle(texts)
    return Corpus(kind, tuple(texts))
