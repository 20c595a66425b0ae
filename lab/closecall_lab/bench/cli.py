"""`closecall bench`: every benchmark in `benchmarks/`, with the options that all of them share."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

from ..spine.options import count, counts, dtypes, one_of, output_dir, positive, threads
from . import benchmarks


def found() -> dict[str, ModuleType]:
    """The benchmarks by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return {n.replace("_", "-"): importlib.import_module(f"{benchmarks.__name__}.{n}") for n in names}


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed against torch, with a table and a plot",
        description="Times our kernels and their rivals in turn, in one loop, and reports medians of ratios.",
        fill=_fill,
    )
    parser.set_defaults(run=lambda _: parser.print_help())


def _fill(parser: argparse.ArgumentParser) -> None:
    listed = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    for name, module in found().items():
        _add(listed, name, module)


def _add(listed: Any, name: str, module: ModuleType) -> None:
    parser = listed.add_parser(name, help=module.HELP, description=module.__doc__)
    full, quick = module.FULL, module.QUICK

    def option(flag: str, metavar: str, what: str, **more: Any) -> None:
        key = flag.removeprefix("--").replace("-", "_")
        if key in full:
            parser.add_argument(flag, metavar=metavar, help=f"{what} ({full[key]}; with --quick {quick[key]})", **more)

    parser.add_argument("--quick", action="store_true", help="a small run: shorter contexts and fewer cells")
    parser.add_argument(
        "--contexts", "--context", metavar="N,...",
        help=f"lengths, k for 1024 ({full['contexts']}; with --quick {quick['contexts']})",
    )  # fmt: skip
    option("--threads", "N,...", "thread counts, `all` among them")
    option("--dims", "D,...", "head dims")
    option("--budget", "K", "budget in blocks; tiles keep twice that")
    option("--seconds", "S", "time to spend on a cell", type=float)
    option("--repeats", "N", "most rounds per cell; at least 3 run")
    option("--rounds", "N", "laps of every contender")
    if "dims" in full:
        parser.add_argument("--dtypes", metavar="TYPE,...", default="fp32,bf16", help="fp32, bf16, fp16 (%(default)s)")
        parser.add_argument("--heads", metavar="H", default=full["heads"], help="query heads (%(default)s)")
        parser.add_argument("--kv-heads", metavar="H", default=full["kv_heads"], help="key heads (%(default)s)")
    parser.add_argument("--isa", metavar="TIER", help="an instruction-set tier of `closecall info` (the best one)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/bench"), help="(%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    module.options(parser)

    def run(args: argparse.Namespace) -> None:
        from . import base

        bench = module.make(args, _read(args, quick if args.quick else full))
        base.run(bench, output_dir("--out", args.out), fresh=args.fresh)

    parser.set_defaults(run=run)


def _read(args: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """The shared options that this benchmark has, read and checked."""
    if args.isa:
        from closecall.backends import cpu

        os.environ["CLOSECALL_ISA"] = one_of("--isa", tuple(cpu.tiers()))(args.isa)
    text = {key: value if (value := getattr(args, key, None)) is not None else defaults[key] for key in defaults}
    values: dict[str, Any] = {
        "contexts": counts("--contexts", text["contexts"]),
        "threads": threads("--threads", text["threads"]),
    }
    for key in ("budget", "repeats", "rounds", "heads", "kv_heads"):
        if key in text:
            values[key] = count(f"--{key.replace('_', '-')}")(text[key])
    if "seconds" in text:
        values["seconds"] = positive("--seconds", text["seconds"])
    if "dims" in text:
        values |= {"dims": counts("--dims", text["dims"]), "dtypes": dtypes("--dtypes", args.dtypes)}
    return values


COMMANDS = (add_bench,)
