"""What a sparse decoding step costs when its selection reads every key, and when it goes on from kept summaries.

`python -m closecall_lab.bench.decode_select --help` has the options.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from closecall.api import attend, select
from closecall.backends import cpu
from closecall.policy import Policy, policy
from closecall.summaries import Summaries

from ..spine import inputs
from ..spine.options import count, counts, each, one_of
from ..spine.results import Facts
from ..spine.table import Column, Table
from ..spine.timing import Contender, Samples, interleave
from . import runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES = ("quest", "auto")
COLUMNS = (
    Column("cache", lambda r: inputs.size(r["context"])),
    Column("type", lambda r: r["dtype"], left=True),
    Column("D", lambda r: r["dim"]),
    Column("threads", lambda r: r["threads"]),
    Column("policy", lambda r: r["policy"], left=True),
    Column("select ms", lambda r: inputs.three_digits(r["select_ms"])),
    Column("kept", lambda r: inputs.three_digits(r["kept_select_ms"])),
    Column("times", lambda r: r["select_ratio"], ".1f"),
    Column("step ms", lambda r: inputs.three_digits(r["step_ms"])),
    Column("kept", lambda r: inputs.three_digits(r["kept_step_ms"])),
    Column("times", lambda r: r["step_ratio"], ".2f"),
    Column("kept MiB", lambda r: r["kept_mib"], ".1f"),
)


@dataclass(frozen=True)
class DecodeSelectBench:
    """Every combination of cache lengths, types and dims is a cell; all policies and thread counts take turns in it."""

    contexts: tuple[int, ...]
    dtypes: tuple[str, ...]
    dims: tuple[int, ...]
    threads: tuple[int, ...]
    heads: int
    kv_heads: int
    budget: int
    repeats: int
    seconds: float
    name: str = "decode_select"

    def cells(self) -> list[Facts]:
        shared = {
            "threads": list(self.threads),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "policies": [policy(name, budget=self.budget).to_json() for name in POLICIES],
            "tier": cpu.tier() if cpu.tiers() else None,
            "repeats": self.repeats,
            "seconds": self.seconds,
        }
        return [
            {"context": n, "dtype": dtype, "dim": dim, **shared}
            for n in sorted(self.contexts)
            for dim in self.dims
            for dtype in self.dtypes
        ]

    def label(self, cell: Facts) -> str:
        return f"selection over a cache of {inputs.size(cell['context'])} {cell['dtype']} D={cell['dim']}"

    def guess(self, cell: Facts) -> float:
        return float(cell["seconds"] + cell["context"] * cell["kv_heads"] * cell["dim"] / 1e8)

    def measure(self, cell: Facts) -> Facts:
        q, k, v = inputs.qkv(cell["heads"], cell["kv_heads"], 1, cell["context"], cell["dim"], cell["dtype"])
        contenders, kept = [], {}
        for name in POLICIES:
            tried = policy(name, budget=self.budget)
            now = k.shape[2] - tried.block // 2  # the last block is half full, as it is on average
            tensors = (q, k[:, :, :now], v[:, :, :now])
            for threads in cell["threads"]:
                kept[name, threads] = Summaries()
                contenders += [
                    _step(_label(name, threads), tensors, tried, None, threads),
                    _step(_label(name, threads, kept=True), tensors, tried, kept[name, threads], threads),
                ]
        samples = interleave(contenders, seconds=cell["seconds"], most_rounds=cell["repeats"])
        return {"rounds": samples.rounds, "rows": [_row(samples, *key, summaries) for key, summaries in kept.items()]}

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table:
        cell = measured[0][0]
        heads = f"{self.heads} query heads on {self.kv_heads} key heads"
        where = f"{machine['cpu']}, {cell['tier']}, torch {machine['torch']}; {heads}"
        notes = [
            "select: of one query row; step: with its attention over the kept blocks. kept: the same going on from",
            "summaries of an earlier step. times: how much longer it takes without.",
            *(str(policy(name, budget=self.budget)) for name in POLICIES),
            f"Medians of at least {min(r['rounds'] for _, r in measured)} interleaved rounds; standard normal q, k, v.",
        ]
        rows = [cell | row for cell, result in measured for row in result["rows"]]
        return Table(f"Sparse decoding: {where}", COLUMNS, rows, notes)

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Figure]:
        return {}  # one number a row: the table says it


def _label(name: str, threads: int, *, kept: bool = False) -> str:
    return f"{name} {threads}" + (" kept" if kept else "")


def _step(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], tried: Policy, summaries: Summaries | None, threads: int
) -> Contender:
    q, k, v = tensors
    steps = {
        "select": lambda _: select(q, k, tried, summaries=summaries),
        "attend": lambda selection: attend(q, k, v, selection),
    }
    return Contender(name, steps, threads)


def _row(samples: Samples, name: str, threads: int, summaries: Summaries) -> Facts:
    without, kept = _label(name, threads), _label(name, threads, kept=True)
    pairs = zip(samples.seconds(without, "select"), samples.seconds(kept, "select"), strict=True)
    return {
        "policy": name,
        "threads": threads,
        "select_ms": 1000 * samples.median(without, "select"),
        "kept_select_ms": 1000 * samples.median(kept, "select"),
        "select_ratio": statistics.median(a / b for a, b in pairs),
        "step_ms": 1000 * samples.median(without),
        "kept_step_ms": 1000 * samples.median(kept),
        "step_ratio": samples.ratio(without, kept),
        "kept_mib": summaries.nbytes / 2**20,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m closecall_lab.bench.decode_select", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--contexts", metavar="N,...", default="32k", help="cache lengths, k for 1024 (%(default)s)")
    parser.add_argument("--dtypes", metavar="TYPE,...", default="fp32,bf16", help="of fp32, bf16, fp16 (%(default)s)")
    parser.add_argument("--dims", metavar="D,...", default="128", help="head dims (%(default)s)")
    parser.add_argument("--threads", metavar="N,...", default="1", help="thread counts (%(default)s)")
    parser.add_argument("--heads", metavar="H", default="32", help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", metavar="H", default="8", help="key heads (%(default)s)")
    parser.add_argument("--budget", metavar="K", default="33", help="in blocks; twice that is kept (%(default)s)")
    parser.add_argument("--seconds", metavar="S", type=float, default=6.0, help="to spend on a cell (%(default)s)")
    parser.add_argument("--repeats", metavar="N", default="15", help="most rounds per cell (%(default)s)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/bench"), help="for results (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    return parser


def _run(args: argparse.Namespace) -> None:
    heads, kv_heads = count("--heads")(args.heads), count("--kv-heads")(args.kv_heads)
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {args.seconds}")
    if not cpu.tiers():
        raise ValueError("the native module is not built, so no summaries are kept: see `closecall info`")
    bench = DecodeSelectBench(
        contexts=counts("--contexts", args.contexts),
        dtypes=each("--dtypes", args.dtypes, one_of("--dtypes", ("fp32", "bf16", "fp16"))),
        dims=counts("--dims", args.dims),
        threads=counts("--threads", args.threads),
        heads=heads,
        kv_heads=kv_heads,
        budget=count("--budget")(args.budget),
        repeats=count("--repeats")(args.repeats),
        seconds=args.seconds,
    )
    tried = policy(POLICIES[0], budget=bench.budget)
    least = tried.rule.limit(2**31) * tried.block
    if min(bench.contexts) <= least:
        raise ValueError(f"--contexts {min(bench.contexts)}: budget {bench.budget} keeps all of {least} keys: use more")
    runner.run(bench, args.out, fresh=args.fresh)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        _run(_parser().parse_args(argv))
    except ValueError as error:
        print(f"decode_select: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
