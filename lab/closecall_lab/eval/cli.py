"""`closecall eval`: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..spine.options import count, counts, output_file

Commands = Any  # argparse's sub-parser collection, whose type is private

ABOUT = """\
Runs every policy at every budget on the same examples of every task, context and model, and keeps what was
measured in one file. Stop it as you like: the same command goes on from there, and a larger one adds to it.
Then it prints, for each task and context, accuracy and paired recall with intervals, the effective budget as
measured, tests between policies, and where a router's lift comes from.

Policies are dense, topk, quest, router, router-on-quest, auto; with overrides, router:q=0.3,rho=2; a router has
controls: router/random and router/last (other tiles are triggered), router/matched (uniform top-k that keeps,
on each example, as many blocks as the router did). RULE-on-SCORER names any other; file:PATH is a saved policy,
as `closecall calibrate --out` leaves it.
"""
EXAMPLES = """\
examples:
  closecall eval --model probe --tasks probe-needle --contexts 8k --budgets 8 --n 50 --controls --store out/eval.db
  closecall eval --model smollm2 --tasks niah-single,niah-multikey:keys=3 --contexts 4k,8k --budgets 8 --n 50
  closecall eval --model qwen2.5-coder-1.5b --tasks code-caller,niah-multikey:keys=16,questions=8,haystack=manuals \
      --contexts 8k --budgets 8 --n 12      each context is read once and asked 8 questions
  closecall eval --model qwen2.5-coder-1.5b --tasks text:kind=code,text:kind=licences --contexts 8k --budgets 8 --n 5
                                            KL to dense, change in loss, agreement, on real text
  closecall eval --model smollm2 --tasks lm-eval:arc_easy --budgets 8 --n 100      contexts do not apply
  closecall eval --store out/eval.db --export out/eval.parquet        only writes what is there
"""


def add_eval(commands: Commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="which policy, at which budget, keeps how many of dense's answers",
        description=ABOUT,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--model", "--models", dest="models", metavar="NAME,...", default="",
        help="probe, probe:qwen3, probe:qwen3:SEED, smollm2, one of `closecall models`, a hub id or a directory",
    )  # fmt: skip
    parser.add_argument(
        "--tasks", "--task", metavar="NAME,...", default="",
        help="with options: niah-multikey:keys=4; lm-eval:NAME for one of the installed lm-eval's",
    )  # fmt: skip
    parser.add_argument("--contexts", "--context", metavar="N,...", default="8k", help="k for 1024 (%(default)s)")
    parser.add_argument("--policies", metavar="NAME,...", default="", help="(dense, the paper's four and auto)")
    parser.add_argument("--controls", action="store_true", help="every router's three controls too")
    parser.add_argument(
        "--budgets", "--budget", metavar="K,...", default="33",
        help="in blocks; tiles keep twice that, unless tile_factor says otherwise (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--n", metavar="N", default="50", help="examples of each task and context (%(default)s)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the examples (%(default)s)")
    parser.add_argument("--dtype", metavar="TYPE", help="fp32, bf16 or fp16 (the type the weights were saved in)")
    parser.add_argument(
        "--store", metavar="FILE", type=Path, default=Path("out/eval.db"), help="where results live (%(default)s)"
    )
    parser.add_argument("--executor", metavar="NAME", default="local", help="local or ray (%(default)s)")
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster (one on this machine)")
    parser.add_argument("--jobs", metavar="N", default="1", help="workers, each with a model of its own (%(default)s)")
    parser.add_argument(
        "--export", metavar="FILE", type=Path, action="append", default=[], help="also as .json, .csv or .parquet"
    )
    parser.set_defaults(run=run)


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
            runner.log(f"{export(store, path)} rows written to {path}")


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

    for option, given in (("--model", args.models), ("--tasks", args.tasks)):
        if not given:
            raise ValueError(f"{option} is missing: name at least one")
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


COMMANDS = (add_eval,)
