"""What the docs point to exists: files and headings behind links, modules by name, commands; their Python parses."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from closecall.cli import parser

HOME = Path(__file__).resolve().parents[1]
PAGES = sorted([HOME / "README.md", HOME / "CHANGELOG.md", *HOME.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)#\s=]+)(?:#[^)]*)?\)")
PLACE = re.compile(r"\]\(([^)#\s=:]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"\b(?:closecall_lab|closecall|research)(?:\.[a-zA-Z_]\w*)+")
COMMAND = re.compile(r"(?:^ *|`|`.*&& )closecall ([a-z][a-z-]+)(?: +(?:--|[A-Z{`])|`|$)", re.MULTILINE)


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if not t.startswith(("http", "mailto:"))]
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """What GitHub calls a page's headings in a link."""
    plain = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in HEADING.findall(page.read_text()))
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_a_heading_that_is_there(page: Path) -> None:
    places = [(page.parent / target if target else page, anchor) for target, anchor in PLACE.findall(page.read_text())]
    missing = [(to.name, anchor) for to, anchor in places if to.suffix == ".md" and anchor not in anchors(to)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_parses_and_imports_what_exists(page: Path) -> None:
    for snippet in SNIPPET.findall(page.read_text()):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("closecall", "closecall_lab"):
                assert not [name.name for name in node.names if not exists(f"{node.module}.{name.name}")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_of_modules_are_right(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("it also names what has left")
    named = {name.rstrip(".") for name in MODULE.findall(page.read_text())}
    files = re.compile(r"\.(?:py|md|json|toml|cpp|h)$")
    assert not sorted(name for name in named if not files.search(name) and not exists(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_there(page: Path) -> None:
    known = set(parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]
    said = set(COMMAND.findall(page.read_text()))
    if page.name == "CHANGELOG.md":
        pytest.skip("it also names what has left")
    assert said <= known
