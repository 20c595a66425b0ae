"""`python -m research.paper`: the paper's tables and ablations for a model of yours, beside the paper's figures."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from closecall.cli import Parser, guarded
from closecall_lab.eval.store import Store
from closecall_lab.report.cli import write
from closecall_lab.spine.options import count, output_dir, shared

from . import experiments, reproduce
from .page import reproduction

REPRODUCE = """\
Runs one of the paper's tables or ablations for a model, and prints our figures beside the paper's. Without a NAME
it lists them. The paper's own contexts and budgets need a large model and a GPU; `--model probe` and `--model smollm2`
run here, with both divided by the same scale, and the title says so. Stop it as you like: results are in the store,
and the same command goes on from there.
"""
EXAMPLES = """\
examples:
  python -m research.paper                                   lists the experiments
  python -m research.paper budget-match --model probe --n 50
  python -m research.paper longbench-v2 --model smollm2 --data longbench_v2.json
"""


def _scale(text: str | None) -> Fraction | None:
    if text is None:
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--scale takes a number like 4 or 2.5, got {text!r}") from None


def options() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m research.paper", description=REPRODUCE, epilog=EXAMPLES)
    parser.add_argument("name", metavar="NAME", nargs="?", help="of an experiment (without one: lists them)")
    parser.add_argument(
        "--model", metavar="NAME", help="as `closecall eval` takes it: probe, smollm2, a hub id, a path"
    )
    parser.add_argument("--n", metavar="N", help="examples of each task and context (as many as in the paper)")
    parser.add_argument(
        "--scale", metavar="X", help="divides the paper's contexts and budgets (probe 4, smollm2 8, others 1)"
    )
    parser.add_argument(
        "--data", metavar="FILE", action="append", default=[],
        help="LongBench's examples, where the hub cannot be reached; for longbench-v1 also NAME=FILE, repeatedly",
    )  # fmt: skip
    shared(parser, "seed", "dtype", "store", "out", "jobs", out_help="where to write (out/reproduce/NAME)")
    parser.add_argument("--executor", metavar="NAME", default="local", help="local or ray (%(default)s)")
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster (one on this machine)")

    def run(args: argparse.Namespace) -> None:
        if args.name is None:
            print(experiments.listing())
            return
        experiment = experiments.get(args.name)
        if args.model is None:
            raise ValueError(
                f"--model is missing: `python -m research.paper {args.name} --model probe` runs on a laptop"
            )
        n = None if args.n is None else count("--n")(args.n)
        jobs = count("--jobs")(args.jobs)
        plan = reproduce.make_plan(
            experiment, args.model, n=n, scale=_scale(args.scale), seed=args.seed, data=args.data
        )
        out = output_dir("--out", args.out or Path("out/reproduce") / args.name)
        with Store(args.store) as store:
            outcome = reproduce.run(
                plan, store, dtype=args.dtype, executor=args.executor, jobs=jobs, address=args.address
            )
        page = reproduction(outcome)
        print(page.text(), end="")
        write(page, out, args.name)

    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    raise SystemExit(guarded(options()))
