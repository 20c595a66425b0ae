"""The options of `closecall gpu-report`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..spine import files
from ..spine.options import count, each, output_file
from ..spine.progress import Line, written
from . import devices

Commands = Any  # argparse's sub-parser collection, whose type is private


def add_gpu_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "gpu-report",
        help="what the GPU kernels compile to: registers, spills, shared memory, pipelining",
        description="Compiles every variant of the GPU kernels for seven kinds of GPU, without one, and prints what\n"
        "each will need there. All of them take hours; what was compiled before is remembered until its source\n"
        "changes, so control-C prints what there is and the same command goes on.\n"
        "Ends with an error if a variant does not compile, spills, or breaks another aim.",
    )
    parser.add_argument("--arch", metavar="NAME,...", help=f"targets, of {', '.join(devices.TARGETS)} (all)")
    parser.add_argument(
        "--kernel", metavar="TEXT,...", help="only variants with one of these in their name: attend, D128; bf16,select"
    )
    parser.add_argument("--jobs", metavar="N", help="compilers at a time (one per core)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything there, machine-readable")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write a page there")

    def run(args: argparse.Namespace) -> None:
        from . import page, report

        archs = tuple(devices.TARGETS)
        if args.arch is not None:
            archs = each("--arch", args.arch, lambda name: devices.target(name).arch)
        jobs = None if args.jobs is None else count("--jobs")(args.jobs)

        for option, path in (("--json", args.json), ("--markdown", args.markdown)):
            if path is not None:
                output_file(option, path)
        line = Line()

        def progress(done: int, total: int, job: tuple[str, str]) -> None:
            text = f"{done}/{total}  {job[1]} for {job[0]}"
            if done == total:
                line.finish(text)
            else:
                line.show(lambda: text)

        found = report.gather(archs, kernel=args.kernel, jobs=jobs, progress=progress)
        print(report.text(found))
        if args.json is not None:
            written([files.write(args.json, json.dumps(found.to_dict(), indent=1) + "\n")])
        if args.markdown is not None:
            written([files.write(args.markdown, page.markdown(found, str(args.markdown)).rstrip("\n") + "\n")])
        if found.left:
            raise ValueError(found.unfinished()[0])
        if broken := found.problems():
            total = len(found.facts) + len(found.failures)
            raise ValueError(f"{len(broken)} of {total} variants break an aim: {broken[0]}")

    parser.set_defaults(run=run)


COMMANDS = (add_gpu_report,)
