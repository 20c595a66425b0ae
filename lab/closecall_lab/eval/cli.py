"""`closecall eval`: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from closecall.cli import Command, Parser

from ..spine.options import count, counts, need, output_file, shared
from ..spine.progress import say

ABOUT = """\
Runs every policy at every budget on the same examples of every task, context and model, and keeps what was
measured in one file. Stop it at any time: the same command continues, and a larger one adds to it. Then it
prints, for each task and context, accuracy and paired recall with intervals, the effective budget as measured,
tests between policies, and where a router's lift comes from.

Policies:
  dense, topk, quest, router, router-on-quest, auto      presets
  RULE-on-SCORER                                         any other combination
  router:q=0.3,rho=2                                     with overrides
  file:PATH, tuned:NAME                                  saved by `closecall calibrate` or `tune`; tuned by us
  tuned:NAME:times=2                                     with twice the blocks for every head, for longer prompts
  router/random, router/last, router/matched             a router's controls: random or the last tiles are expanded;
                                                         uniform top-k with as many blocks as the router kept
"""
EXAMPLES = """\
examples:
  closecall eval --model probe --tasks probe-needle --contexts 8k --budgets 8 --n 50 --controls --store out/eval.db
  closecall eval --model smollm2 --tasks niah-single,niah-multikey:keys=3 --contexts 4k,8k --budgets 8 --n 50
  closecall eval --model qwen2.5-coder-1.5b --tasks code-caller,niah-multikey:keys=16,questions=8,haystack=manuals \\
      --contexts 8k --budgets 8 --n 12      each context is read once and asked 8 questions
  closecall eval --model qwen2.5-coder-1.5b --tasks text:kind=code,text:kind=licences --contexts 8k --budgets 8 --n 5
                                            KL to dense, change in loss, agreement, on real text
  closecall eval --model smollm2 --tasks lm-eval:arc_easy --budgets 8 --n 100      contexts do not apply
  closecall eval --store out/eval.db --export out/eval.parquet        only writes what is there
"""


def options(parser: Parser) -> None:
    shared(parser, "models", "tasks", "contexts")
    parser.add_argument(
        "--policies", metavar="NAME,...", default="", help="what to run (dense, the paper's four and auto)"
    )
    parser.add_argument("--controls", action="store_true", help="also run every router's three controls")
    shared(parser, "budgets", "n", "seed", "dtype", "store", "jobs", store_help="where results live")
    parser.add_argument("--executor", metavar="NAME", default="local", help="local or ray (%(default)s)")
    parser.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster (one on this machine)")
    parser.add_argument(
        "--export", metavar="FILE", type=Path, action="append", default=[], help="also write .json, .csv or .parquet"
    )


def run(args: argparse.Namespace) -> None:
    from . import runner, summary
    from .export import check_kind, export
    from .store import Store

    asked = bool(args.models or args.tasks)
    if not asked and not args.export:
        raise ValueError("nothing to do: name --model and --tasks to evaluate, or --export to write what is stored")
    for path in args.export:  # before the work, not after it
        check_kind(output_file("--export", path))
    grid = read(args) if asked else None
    with Store(args.store, create=grid is not None) as store:
        if grid is not None:
            options = {"executor": args.executor, "jobs": count("--jobs")(args.jobs), "address": args.address}
            models = runner.run(grid, store, **options)
            show(grid, store, models, summary)
        for path in args.export:
            say(f"{export(store, path)} rows written to {path}")


def show(grid: Any, store: Any, models: list[str], summary: Any) -> None:
    """The tables of what the grid asked for, of all that the store may hold."""
    from closecall.models.load import own_name

    from . import text_tables

    wanted = {(str(spec), budget) for spec, budget in grid.variants}
    names = {fingerprint: facts["name"] for fingerprint, facts in store.models().items()}
    for model in models:
        for task, context in grid.places:
            where = {"model": model, "task": task, "context": context, "seed": grid.seed}
            for group in summary.groups(store, variants=wanted, n=grid.n, **where):
                tables = text_tables.tables if text_tables.is_text(group) else summary.tables
                for table in tables(group, own_name(names[model])):
                    print(table.text() + "\n")


def read(args: argparse.Namespace) -> Any:
    """The grid that the options describe."""
    from .grid import Grid
    from .spec import DEFAULT, Spec, split, with_controls

    need(model=args.models, tasks=args.tasks)
    specs = [Spec.parse(text) for text in split(args.policies) or DEFAULT]
    return Grid(
        models=tuple(split(args.models)),
        tasks=tuple(split(args.tasks)),
        contexts=counts("--contexts", args.contexts),
        specs=tuple(with_controls(specs) if args.controls else specs),
        budgets=counts("--budgets", args.budgets),
        n=count("--n")(args.n),
        seed=args.seed,
        dtype=args.dtype,
    )


EVAL = Command(
    "eval", "which policy, at which budget, keeps how many of dense's answers", ABOUT, options, run, EXAMPLES
)
COMMANDS = (EVAL,)
