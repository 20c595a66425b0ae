"""`closecall report` and `closecall reproduce`: their options, and what they print."""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options import count, each

if TYPE_CHECKING:
    from .page import Page

Commands = Any  # argparse's sub-parser collection, whose type is private
STORE = Path("out/eval.db")

REPORT = """\
Prints and writes what a store of results says: accuracy over the measured effective budget, paired recall with
exact tests, how much of a router's lift is budget and how much selectivity, gold blocks kept by layer, and how
often the tile with the question was triggered. Leaves report.md, report.html (one file, plots inside), panel.md
(who beats whom, over all tasks, contexts and budgets), and every plot as PNG and SVG. What is missing or unbalanced
is said, not hidden.
"""
REPRODUCE = """\
Runs one of the paper's tables or ablations for a model, and prints our figures beside the paper's. Without a NAME
it lists them. The paper's own contexts and budgets need a large model and a GPU; `--model probe` and `--model smollm2`
run here, with both divided by the same scale, and the title says so. Stop it as you like: results are in the store,
and the same command goes on from there.
"""
EXAMPLES = """\
examples:
  closecall reproduce                                   lists the experiments
  closecall reproduce budget-match --model probe --n 50
  closecall reproduce longbench-v2 --model smollm2 --data longbench_v2.json
"""


def add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report", help="what a store of results says: tables, curves with intervals, one HTML page", description=REPORT
    )
    _store(parser, "of `closecall eval`")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("out/report"), help="where to write (%(default)s)"
    )
    parser.add_argument(
        "--model", "--models", dest="models", metavar="NAME,...", help="only these, by name or fingerprint (all)"
    )

    def run(args: argparse.Namespace) -> None:
        from ..evaluate.store import Store
        from .compose import page
        from .gather import gather
        from .standings import markdown

        with Store(args.store, create=False) as store:
            found = gather(store, models=None if args.models is None else each("--model", args.models, str))
        _finish(page(found), args.out, "report", panel=markdown(found))

    parser.set_defaults(run=run)


def add_reproduce(commands: Commands) -> None:
    parser = commands.add_parser(
        "reproduce",
        help="the paper's tables and ablations for a model of yours, beside the paper's figures",
        description=REPRODUCE,
        epilog=EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="of an experiment (without one: lists them)")
    parser.add_argument(
        "--model", metavar="NAME", help="as `closecall eval` takes it: probe, smollm2, a hub id, a path"
    )
    parser.add_argument("--n", metavar="N", help="examples of each task and context (as many as in the paper)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the examples (%(default)s)")
    parser.add_argument(
        "--scale", metavar="X", help="divides the paper's contexts and budgets (probe 4, smollm2 8, others 1)"
    )
    parser.add_argument(
        "--data", metavar="FILE", action="append", default=[],
        help="LongBench's examples, where the hub cannot be reached; for longbench-v1 also NAME=FILE, repeatedly",
    )  # fmt: skip
    parser.add_argument("--dtype", metavar="TYPE", help="fp32, bf16 or fp16 (the type the weights were saved in)")
    _store(parser, "where results live")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write (out/reproduce/NAME)")
    parser.add_argument("--executor", metavar="NAME", default="local", help="local or ray (%(default)s)")
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster (one on this machine)")
    parser.add_argument("--jobs", metavar="N", default="1", help="workers, each with a model of its own (%(default)s)")

    def run(args: argparse.Namespace) -> None:
        from . import experiments

        if args.name is None:
            print(experiments.listing())
            return
        experiment = experiments.get(args.name)
        if args.model is None:
            raise ValueError(f"--model is missing: `closecall reproduce {args.name} --model probe` runs on a laptop")
        from ..evaluate.store import Store
        from . import reproduce
        from .compose import reproduction

        n = None if args.n is None else count("--n")(args.n)
        jobs = count("--jobs")(args.jobs)
        plan = reproduce.make_plan(
            experiment, args.model, n=n, scale=_scale(args.scale), seed=args.seed, data=args.data
        )
        with Store(args.store) as store:
            outcome = reproduce.run(
                plan, store, dtype=args.dtype, executor=args.executor, jobs=jobs, address=args.address
            )
        _finish(reproduction(outcome), args.out or Path("out/reproduce") / args.name, args.name)

    parser.set_defaults(run=run)


def _store(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--store", metavar="FILE", type=Path, default=STORE, help=f"{what} (%(default)s)")


def _scale(text: str | None) -> Fraction | None:
    if text is None:
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--scale takes a number like 4 or 2.5, got {text!r}") from None


def _finish(page: Page, out: Path, stem: str, *, panel: str = "") -> None:
    print(page.text(), end="")
    if page.sections:
        written = page.write(out, stem)
        pages, pictures = written[:2], len(written) - 2
        if panel:
            pages.append(out / "panel.md")
            pages[-1].write_text(panel)
        print(f"written: {' '.join(map(str, pages))} and {pictures} pictures in {out}", file=sys.stderr)
