"""`make bench-check`: has something become slower? Reruns a few ratios and compares them with committed ones.

Ratios, not times: ours, torch SDPA and our own dense kernel take turns in one loop, so a busy machine disturbs all
alike. How far a ratio may fall before it counts as a slow-down follows from how far it moved between repeated runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from closecall import info
from closecall.backends import cpu
from closecall.policy import policy

from ..spine import files
from ..spine.numbers import size
from ..spine.options import count
from ..spine.progress import say, written
from ..spine.results import Facts
from ..spine.table import Column, Table
from .benchmarks.attention import AttentionBench, Named

FILE = Path("benchmarks/check.json")
LEAST_REPEATS = 5  # of the committed ratios: a spread from fewer says little
FALSE_ALARMS = 0.01  # how often a check may fail though nothing changed, over all its ratios
MUST_AGREE = ("cpu", "tier")  # ratios of other processors or instruction sets are other ratios
Ratios = dict[str, list[float]]


@dataclass(frozen=True)
class RatioCheck:
    """One ratio: how many times faster than its rival, then and now (geometric means), and the least it may be now."""

    name: str
    then: float
    now: float
    least: float
    most: float

    @property
    def slower(self) -> bool:
        return self.now < self.least

    @property
    def faster(self) -> bool:
        return self.now > self.most

    @property
    def verdict(self) -> str:
        return "SLOWER" if self.slower else "faster" if self.faster else "as before"


def bench(seconds: float) -> AttentionBench:
    return AttentionBench(
        contexts=(16 * 1024,),
        dtypes=("fp32", "bf16"),
        dims=(128,),
        threads=(1,),
        policies=(Named("router-on-quest", policy("router-on-quest")),),
        baselines=("sdpa", "dense"),
        heads=2,
        kv_heads=1,
        repeats=15,
        seconds=seconds,
    )


def ratios(cell: Facts, result: Facts) -> dict[str, float]:
    """How many times faster: above 1 we win, and less than before is a slow-down."""
    where = f"{size(cell['context'])} {cell['dtype']}"
    routed, dense = result["ours"]["router-on-quest"], result["ours"]["dense"]
    return {
        f"{where}: router-on-quest over SDPA": routed["vs_sdpa"],
        f"{where}: router-on-quest over our dense kernel": routed["vs_dense"],
        f"{where}: our dense kernel over SDPA": dense["vs_sdpa"],
        f"{where}: selection over our dense kernel": result["ms"]["dense"] / routed["select_ms"],
    }


def run(repeats: int, seconds: float) -> Ratios:
    measuring = bench(seconds)
    measured: Ratios = {}
    for repeat in range(repeats):
        for cell in measuring.cells():
            say(f"[{repeat + 1}/{repeats}] {measuring.label(cell)}")
            for name, ratio in ratios(cell, measuring.measure(cell)).items():
                measured.setdefault(name, []).append(ratio)
    return measured


def tolerance(then: Sequence[float], repeats: int, tests: int) -> float:
    """How far apart two means of logarithms may lie by chance: `then` and one of `repeats` new runs.

    Student's t for the difference of two means with the spread of `then`, one-sided, at FALSE_ALARMS shared by all
    tests.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    spread = statistics.stdev(map(math.log, then))
    return float(t.isf(FALSE_ALARMS / tests, len(then) - 1)) * spread * math.sqrt(1 / len(then) + 1 / repeats)


def compare(then: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> list[RatioCheck]:
    if set(then) != set(now):
        odd = sorted(set(then) ^ set(now))
        raise ValueError(f"the committed ratios are of other cases ({odd[0]!r}, ...): write new ones with --update")
    checks = []
    for name in then:
        before, after = (statistics.fmean(map(math.log, x[name])) for x in (then, now))
        apart = tolerance(then[name], len(now[name]), len(then))
        limits = (math.exp(before - apart), math.exp(before + apart))
        checks.append(RatioCheck(name, math.exp(before), math.exp(after), *limits))
    return checks


def facts() -> Facts:
    return info.machine() | {"tier": cpu.tier() if cpu.tiers() else None}


def read(path: Path) -> tuple[Facts, Ratios]:
    """The committed ratios, if they are ones that can be compared with this machine's."""
    if not path.exists():
        raise ValueError(f"{path} is not there: write it with --update")
    try:
        content = json.loads(path.read_text())
        machine = dict(content["machine"])
        ratios = {name: [float(x) for x in xs] for name, xs in content["ratios"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of ratios: write it anew with --update") from error
    for name, values in ratios.items():
        if len(values) < LEAST_REPEATS:
            raise ValueError(
                f"{path} has {len(values)} runs of {name!r}, too few to know its spread: --update with at least "
                f"{LEAST_REPEATS}"
            )
    return machine, ratios


def check_machine(then: Facts, now: Facts) -> None:
    for key in MUST_AGREE:
        if then.get(key) != now.get(key):
            raise ValueError(
                f"the committed ratios are of {key} {then.get(key)!r}, and this is {now.get(key)!r}: they cannot be "
                "compared; write this machine's with --update, to another --file"
            )


def write(path: Path, machine: Facts, found: Ratios) -> None:
    files.write(path, json.dumps({"machine": machine, "ratios": found}, indent=1) + "\n")


def table(checks: Sequence[RatioCheck]) -> Table:
    columns = (
        Column("ratio", "name", left=True),
        Column("committed", "then", ".3f"),
        Column("now", "now", ".3f"),
        Column("at least", "least", ".3f"),
        Column("verdict", "verdict", left=True),
    )
    notes = (
        "How many times faster; geometric means of repeated runs.",
        "at least: a fall below it is more than repeated runs explain "
        f"(false alarms: {FALSE_ALARMS:.0%} over all rows).",
    )
    return Table("Speed, against the committed ratios", columns, checks, notes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m closecall_lab.bench.check", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--file", metavar="FILE", type=Path, default=FILE, help="the committed ratios (%(default)s)")
    parser.add_argument("--update", action="store_true", help="write this machine's ratios, and compare nothing")
    parser.add_argument(
        "--add", action="store_true", help="add these runs to those in the file: another hour shows more of the spread"
    )
    parser.add_argument("--repeats", metavar="N", help=f"runs of everything (3; with --update {LEAST_REPEATS})")
    parser.add_argument("--seconds", metavar="S", type=float, default=10.0, help="of each case in a run (%(default)s)")
    return parser


def check(args: argparse.Namespace) -> int:
    repeats = count("--repeats")(args.repeats) if args.repeats else LEAST_REPEATS if args.update else 3
    if args.update and args.add:
        raise ValueError("--update writes the ratios anew and --add adds to them: name one of the two")
    if args.update and repeats < LEAST_REPEATS:
        raise ValueError(f"--repeats {repeats} is too few to know the spread: --update needs at least {LEAST_REPEATS}")
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {args.seconds}")
    if not cpu.tiers():
        raise ValueError("the native module is not built, so there is no speed to check: see `closecall info`")
    here = facts()
    then: Ratios = {}
    if not args.update:
        machine, then = read(args.file)
        check_machine(machine, here)
        for key in ("torch", "cores"):
            if machine.get(key) != here[key]:
                say(f"note: {key} was {machine.get(key)} and is {here[key]}")
    now = run(repeats, args.seconds)
    if args.update or args.add:
        write(args.file, here, {name: [*then.get(name, []), *values] for name, values in now.items()})
        written([args.file])
        return 0
    checks = compare(then, now)
    print(table(checks).text())
    slower = [f for f in checks if f.slower]
    for f in slower:
        say(f"slower: {f.name} fell from {f.then:.3f} to {f.now:.3f}; repeated runs explain a fall to {f.least:.3f}")
    if any(f.faster for f in checks) and not slower:
        say("faster than committed: --update keeps it")
    return 1 if slower else 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return check(_parser().parse_args(argv))
    except ValueError as error:
        print(f"bench-check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
