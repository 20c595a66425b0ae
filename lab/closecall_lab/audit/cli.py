"""The options of `closecall gpu-report`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..spine.options import count, each
from . import devices

Commands = Any  # argparse's sub-parser collection, whose type is private


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.endswith("\n") else text + "\n")
    print(f"wrote {path}", file=sys.stderr)


def _outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything there, machine-readable")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write a page there")


def add_gpu_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "gpu-report",
        help="what the GPU kernels compile to: registers, spills, shared memory, pipelining",
        description="Compiles every variant of the GPU kernels for sm_80, sm_90, sm_100 and gfx942, without a GPU,\n"
        "and prints what each will need there. What was compiled before is remembered until its source changes.\n"
        "Ends with an error if a variant does not compile, spills, or breaks another aim.",
    )
    parser.add_argument("--arch", metavar="NAME,...", help=f"targets, of {', '.join(devices.TARGETS)} (all)")
    parser.add_argument("--kernel", metavar="TEXT", help="only variants with this in their name, like attend or D128")
    parser.add_argument("--jobs", metavar="N", help="compilers at a time (one per core)")
    _outputs(parser)

    def run(args: argparse.Namespace) -> None:
        from . import report

        archs = tuple(devices.TARGETS)
        if args.arch is not None:
            archs = each("--arch", args.arch, lambda name: devices.target(name).arch)
        jobs = None if args.jobs is None else count("--jobs")(args.jobs)

        def progress(done: int, total: int, job: tuple[str, str]) -> None:
            line = f"{done}/{total}  {job[1]} for {job[0]}"
            if sys.stderr.isatty():  # one line that is written over
                print(f"\x1b[K{line}", end="\n" if done == total else "\r", file=sys.stderr, flush=True)
            elif done % 20 == 0 or done == total:
                print(line, file=sys.stderr, flush=True)

        found = report.gather(archs, kernel=args.kernel, jobs=jobs, progress=progress)
        print(report.text(found))
        if args.json is not None:
            _write(args.json, json.dumps(found.to_dict(), indent=1))
        if args.markdown is not None:
            _write(args.markdown, report.markdown(found, str(args.markdown)))
        if broken := found.problems():
            total = len(found.facts) + len(found.failures)
            raise ValueError(f"{len(broken)} of {total} variants break an aim: {broken[0]}")

    parser.set_defaults(run=run)


COMMANDS = (add_gpu_report,)
