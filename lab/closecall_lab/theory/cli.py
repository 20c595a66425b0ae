"""`closecall diagnose` and `closecall calibrate`: their options, and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path

from closecall.cli import Command, Parser

from ..spine import figure, files
from ..spine.options import count, counts, each, need, one_of, output_dir, output_file, shared
from ..spine.progress import written

ABOUT_DIAGNOSE = """\
Runs a model over prompts of a task and looks at every cut that a router would make: how close it was, how noisy
the scores are, what the cut really lost, and which signal would have told. Streams it all into DIR/diagnose.parquet,
then prints the paper's table, the Monte-Carlo regret of every trigger, q* by layer, and how well each signal ranks
the true loss; writes the same as DIR/report.md, with pictures. `--report DIR` does the second part alone.
"""
DIAGNOSE_EXAMPLES = """\
examples:
  closecall diagnose --model probe --task probe-scattered --context 8k --budget 8 --n 4 --out out/diagnose
  closecall diagnose --report out/diagnose --samples 64
"""
ABOUT_CALIBRATE = """\
Finds, from a few prompts, the margin threshold of every layer (with --per-head: of every head) that triggers the
wanted share of tiles, and writes the policy with them. Such a policy decides each tile by itself: prefill in chunks,
on a cached prefix or at once makes the same choices. Further prompts show the rates it really reaches.
"""
CALIBRATE_EXAMPLES = """\
examples:
  closecall calibrate --model probe --task probe-scattered --context 4k,8k --budget 8 --out out/policy.json
  closecall calibrate --model smollm2 --dtype fp32 --context 4k,7k --task text:files=prompts/ --budget 8
  in Python: closecall.attach(model, "out/policy.json")
  in vLLM:   --additional-config '{"closecall": {"policy": "out/policy.json"}}'
"""


def _model_and_task(parser: argparse.ArgumentParser, **changes: str) -> None:
    shared(parser, "model", "task", "seed", "dtype", "budget", seed_help="seed of the prompts", **changes)
    parser.add_argument("--q", metavar="Q", type=float, default=0.4, help="share of tiles to expand (%(default)s)")
    parser.add_argument(
        "--rho",
        metavar="R",
        type=float,
        default=2,
        help="budget of an expanded tile, over the tile budget (%(default)s)",
    )


def diagnose_options(parser: Parser) -> None:
    _model_and_task(parser)
    shared(parser, "context", "n", "out", n="4", n_help="prompts", out=Path("out/diagnose"))
    parser.add_argument("--scorers", metavar="NAME,...", default="mean,quest", help="(%(default)s)")
    parser.add_argument(
        "--tile-factor", metavar="F", type=float, default=2, help="tile budget over budget (%(default)s)"
    )
    parser.add_argument(
        "--prefill", metavar="HOW", default="dense", help="dense, or policy: by each router itself (%(default)s)"
    )
    parser.add_argument(
        "--certify", metavar="K,...", default="", help="also certify the first prompt's rows at these budgets (slow)"
    )
    parser.add_argument(
        "--samples", metavar="N", default="32", help="Monte-Carlo draws for each cell, even (%(default)s)"
    )
    parser.add_argument("--report", metavar="DIR", type=Path, help="read this dump, run no model")


def run_diagnose(args: argparse.Namespace) -> None:
    samples = count("--samples")(args.samples)
    if samples < 4 or samples % 2:  # two halves judge each other
        raise ValueError(f"--samples takes an even number of at least 4, got {samples}")
    if args.report is not None:
        if args.model or args.task:
            raise ValueError("--report reads a dump and runs no model: drop --model and --task, or --report")
        report(args.report, samples)
        return
    need(model=args.model, task=args.task)
    from closecall.scorers.base import SCORERS

    from ..eval.subject import Subject
    from . import certified
    from .diagnose import Study, diagnose
    from .dump import NAME

    study = Study(
        model=args.model,
        task=args.task,
        context=count("--context")(args.context),
        n=count("--n")(args.n),
        seed=args.seed,
        scorers=each("--scorers", args.scorers, one_of("scorer", SCORERS.names())),
        budget=count("--budget")(args.budget),
        tile_factor=args.tile_factor,
        q=args.q,
        rho=args.rho,
        prefill=one_of("prefill", ("dense", "policy"))(args.prefill),  # type: ignore[arg-type]
        dtype=args.dtype,
    )
    budgets = counts("--certify", args.certify) if args.certify else ()
    output_dir("--out", args.out)
    subject = Subject.open(args.model, dtype=args.dtype)
    diagnose(study, args.out / NAME, subject=subject)
    (args.out / certified.NAME).unlink(missing_ok=True)
    if budgets:
        certified.write(certified.shares(subject, study, budgets), args.out)
    report(args.out, samples)


def report(where: Path, samples: int) -> None:
    """Prints what a dump says; writes it beside the dump."""
    from . import certified, figures
    from .diagnose_report import findings_of, markdown, tables
    from .dump import Dump

    dump = Dump(where)
    directory = dump.path.parent
    findings, shares = findings_of(dump, samples=samples), certified.read(directory)
    found = [*tables(findings), *([certified.table(shares)] if shares else [])]
    for table in found:
        print(table.text() + "\n")
    pictures = figure.save(figures.drawn(findings, shares), directory)
    budgets = ",".join(map(str, dict.fromkeys(s.budget for s in shares)))
    names = [path.name for path in pictures if path.suffix == ".png"]
    page = markdown(findings, [certified.table(shares)] if shares else [], names, budgets)
    written([files.write(directory / "report.md", page), *pictures])


def calibrate_options(parser: Parser) -> None:
    _model_and_task(
        parser, task="text", task_help="prompts to calibrate on; text:files=DIR for text files like your own"
    )
    shared(parser, "contexts", "n", n="4", n_help="prompts of each context to calibrate on")
    parser.add_argument("--policy", metavar="NAME", default="router-on-quest", help="a router (%(default)s)")
    parser.add_argument("--check", metavar="N", type=int, default=2, help="further prompts to check on (%(default)s)")
    parser.add_argument("--per-head", action="store_true", help="a threshold for every head, too")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("out/policy.json"), help="(%(default)s)")


def run_calibrate(args: argparse.Namespace) -> None:
    need(model=args.model, task=args.task)
    if args.check < 0:
        raise ValueError(f"--check takes a number of prompts, 0 for none, got {args.check}")
    import dataclasses

    from ..eval.spec import Spec
    from ..eval.subject import Subject
    from .calibrate import calibrate, router_of

    policy = Spec.parse(args.policy).policy(count("--budget")(args.budget))
    policy = policy.replace(rule=dataclasses.replace(router_of(policy), q=args.q, rho=args.rho))
    router_of(policy)
    contexts, n = counts("--contexts", args.contexts), count("--n")(args.n)
    output_file("--out", args.out)
    subject = Subject.open(args.model, dtype=args.dtype)
    calibration = calibrate(
        subject, args.task, contexts, policy, n=n, check=args.check, seed=args.seed, per_head=args.per_head
    )
    print(calibration.table(args.model).text())
    calibration.policy.save(args.out)
    written([args.out])


DIAGNOSE = Command(
    "diagnose",
    "how close the cuts of a model are, what they lose, and which trigger would tell",
    ABOUT_DIAGNOSE,
    diagnose_options,
    run_diagnose,
    DIAGNOSE_EXAMPLES,
)
CALIBRATE = Command(
    "calibrate",
    "margin thresholds for every layer, so that tiles decide alone",
    ABOUT_CALIBRATE,
    calibrate_options,
    run_calibrate,
    CALIBRATE_EXAMPLES,
)
COMMANDS = (DIAGNOSE, CALIBRATE)
