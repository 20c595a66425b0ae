"""`closecall report`: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spine import files
from ..spine.options import each, output_dir
from ..spine.progress import say

if TYPE_CHECKING:
    from ..spine.page import Page

Commands = Any  # argparse's sub-parser collection, whose type is private
STORE = Path("out/eval.db")

REPORT = """\
Says in a few lines what a store of results shows, and writes the rest: accuracy over the measured effective budget,
paired recall with exact tests, how much of a router's lift is budget and how much selectivity, gold blocks kept by
layer, and how often the tile with the question was triggered. Leaves report.md, report.html (one file, plots inside),
panel.md (who beats whom, over all tasks, contexts and budgets), and every plot as PNG and SVG. What is missing or
unbalanced is said, not hidden.
"""


def add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report", help="what a store of results says: tables, curves with intervals, one HTML page", description=REPORT
    )
    store_option(parser, "of `closecall eval`")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("out/report"), help="where to write (%(default)s)"
    )
    parser.add_argument(
        "--model", "--models", dest="models", metavar="NAME,...", help="only these, by name or fingerprint (all)"
    )
    parser.add_argument("--verbose", action="store_true", help="print the whole report, not only its verdict")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ..eval.store import Store
    from .compose import page
    from .gather import gather
    from .standings import markdown
    from .verdict import verdict

    with Store(args.store, create=False) as store:
        gathered = gather(store, models=None if args.models is None else each("--model", args.models, str))
    if not gathered.settings:
        print("\n".join(gathered.notes))
        return
    out = output_dir("--out", args.out)
    whole = page(gathered)
    print(whole.text() if args.verbose else "\n".join(verdict(gathered)))
    write(whole, out, "report", panel=markdown(gathered))


def store_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--store", metavar="FILE", type=Path, default=STORE, help=f"{what} (%(default)s)")


def write(page: Page, out: Path, stem: str, *, panel: str = "") -> None:
    """Writes the page and its pictures, and says where they are."""
    written = page.write(out, stem)
    pages = [*written[:2], *([files.write(out / "panel.md", panel)] if panel else [])]
    say(f"written: {' '.join(map(str, pages))} and {len(written) - 2} pictures in {out}")


COMMANDS = (add_report,)
