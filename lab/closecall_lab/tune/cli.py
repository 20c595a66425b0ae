"""`closecall tune`: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..spine.options import count, output_dir, output_file
from ..spine.progress import say, written

ABOUT = """\
Measures a model on your own text and writes a policy whose budgets differ by layer and head: every head gets blocks
where they save most output error, at the same mean. Half of the text is fitted on, the other half judges the result:
KL to dense, change in loss, blocks kept, prefill time, beside the same blocks for every head. Stop it as you like: what
was measured is in --work, and the same command goes on from there.
"""
EXAMPLES = """\
examples:
  closecall tune --model smollm2 --context 4k --mean 8
  closecall tune --model qwen2.5-coder-1.5b --text src/ --context 8k --target-kl 0.02 --out coder.json
then:
  closecall eval --model smollm2 --policies dense,file:out/tuned.json ...
  closecall.attach(model, "out/tuned.json")
"""
KINDS = ("code", "manuals", "docstrings")


def add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune", help="budgets by layer and head for a model, on your own text", description=ABOUT, epilog=EXAMPLES
    )
    parser.add_argument("--model", metavar="NAME", required=True, help="as `closecall eval` takes it")
    parser.add_argument(
        "--text", metavar="PATH", type=Path, help=f"a file or a directory (default: {', '.join(KINDS)})"
    )
    parser.add_argument("--context", metavar="N", default="8k", help="tokens of a piece, k for 1024 (%(default)s)")
    parser.add_argument("--pieces", metavar="N", default="6", help="at most; every second one judges (%(default)s)")
    parser.add_argument("--policy", metavar="POLICY", default="auto", help="whose scorer and protection (%(default)s)")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--mean", metavar="B", type=float, help="mean tile budget (an eighth of the context's blocks)")
    goal.add_argument("--target-kl", metavar="X", type=float, help="the fewest blocks with at most this KL to dense")
    goal.add_argument("--speedup", metavar="Y", type=float, help="the most blocks at which prefill is Y times as fast")
    parser.add_argument("--dtype", metavar="TYPE", help="fp32, bf16 or fp16 (the type the weights were saved in)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("out/tuned.json"), help="(%(default)s)")
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path("out/tune"), help="(%(default)s)")
    parser.set_defaults(run=run_tune)


def run_tune(args: argparse.Namespace) -> None:
    from closecall.policy import as_policy

    from ..eval.subject import Subject
    from .fit import fit
    from .judge import Judge
    from .pieces import cut, halves, texts
    from .search import Goal, search

    context, most = count("--context")(args.context), count("--pieces")(args.pieces)
    base = as_policy(args.policy)
    if base.scorer is None:
        raise ValueError(f"policy {base.name!r} ranks nothing, so it has no budgets to tune: use auto or quest")
    if base.share == "group":
        raise ValueError("tune fits a budget for each query head, and under share='group' heads share: leave it out")
    n_blocks = -(-context // base.block)
    unset = args.mean is None and args.target_kl is None and args.speedup is None
    goal = Goal(n_blocks / 8 if unset else args.mean, args.target_kl, args.speedup)
    output_file("--out", args.out)
    output_dir("--work", args.work)
    subject = Subject.open(args.model, dtype=args.dtype)
    subject.check_room(context)
    pieces = cut(subject.loaded.tokenizer, texts(args.text, KINDS), context, most)
    fitting, judging = halves(pieces)
    say(f"{len(fitting)} pieces of {context} tokens to fit on, {len(judging)} to judge by")
    curves = fit(subject.loaded, fitting, base, args.work, say=say)
    tuned = search(curves, base, goal, Judge(subject.loaded, judging, args.work, say), context)
    names = {"fitted on": [p.name for p in fitting], "judged on": [p.name for p in judging]}
    tuned.chosen.policy.save(args.out, measured={"model": subject.loaded.label} | names | tuned.measured)
    print(tuned.table().text())
    written([args.out])


COMMANDS = (add_tune,)
