"""`closecall report`: its options, and what it prints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spine.options import each

if TYPE_CHECKING:
    from ..spine.page import Page

Commands = Any  # argparse's sub-parser collection, whose type is private
STORE = Path("out/eval.db")

REPORT = """\
Prints and writes what a store of results says: accuracy over the measured effective budget, paired recall with
exact tests, how much of a router's lift is budget and how much selectivity, gold blocks kept by layer, and how
often the tile with the question was triggered. Leaves report.md, report.html (one file, plots inside), panel.md
(who beats whom, over all tasks, contexts and budgets), and every plot as PNG and SVG. What is missing or unbalanced
is said, not hidden.
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

    def run(args: argparse.Namespace) -> None:
        from ..eval.store import Store
        from .compose import page
        from .gather import gather
        from .standings import markdown

        with Store(args.store, create=False) as store:
            found = gather(store, models=None if args.models is None else each("--model", args.models, str))
        finish(page(found), args.out, "report", panel=markdown(found))

    parser.set_defaults(run=run)


def store_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--store", metavar="FILE", type=Path, default=STORE, help=f"{what} (%(default)s)")


def finish(page: Page, out: Path, stem: str, *, panel: str = "") -> None:
    print(page.text(), end="")
    if page.sections:
        written = page.write(out, stem)
        pages, pictures = written[:2], len(written) - 2
        if panel:
            pages.append(out / "panel.md")
            pages[-1].write_text(panel)
        print(f"written: {' '.join(map(str, pages))} and {pictures} pictures in {out}", file=sys.stderr)


COMMANDS = (add_report,)
