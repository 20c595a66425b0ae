"""`closecall report`: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from closecall.cli import Command, Parser

from ..spine import files
from ..spine.options import each, output_dir, shared
from ..spine.progress import say

if TYPE_CHECKING:
    from ..spine.page import Page


ABOUT = """\
Says in a few lines what a store of results shows, and writes the rest: accuracy over the measured effective budget,
paired recall with exact tests, how much of a router's lift is budget and how much selectivity, gold blocks kept by
layer, how often the tile with the question was triggered, and KL to dense on texts without questions. Leaves report.md,
report.html (one file, plots inside), panel.md (who beats whom, over all tasks, contexts and budgets), and every plot as
PNG and SVG. What is missing or unbalanced is said, not hidden.
"""


def options(parser: Parser) -> None:
    shared(
        parser, "store", "out", "models", out=Path("out/report"), models=None,
        store_help="of `closecall eval`", models_help="only these, by name or fingerprint (all)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="print the whole report, not only its verdict")


def run(args: argparse.Namespace) -> None:
    from ..eval.store import Store
    from .compose import page
    from .gather import gather
    from .standings import markdown
    from .verdict import verdict

    with Store(args.store, create=False) as store:
        gathered = gather(store, models=None if args.models is None else each("--model", args.models, str))
    if not gathered.places:
        print("\n".join(gathered.notes))
        return
    out = output_dir("--out", args.out)
    whole = page(gathered)
    print(whole.text() if args.verbose else "\n".join(verdict(gathered)))
    write(whole, out, "report", panel=markdown(gathered))


def write(page: Page, out: Path, stem: str, *, panel: str = "") -> None:
    """Writes the page and its pictures, and says where they are."""
    written = page.write(out, stem)
    pages = [*written[:2], *([files.write(out / "panel.md", panel)] if panel else [])]
    say(f"written: {' '.join(map(str, pages))} and {len(written) - 2} pictures in {out}")


REPORT = Command(
    "report", "what a store of results says: tables, curves with intervals, one HTML page", ABOUT, options, run
)
COMMANDS = (REPORT,)
