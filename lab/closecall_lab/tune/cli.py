"""`closecall tune`: its options, and what it prints."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ..spine.options import count, output_dir, output_file
from ..spine.progress import say, written

ABOUT = """\
Measures a model on your own text and writes a policy whose budgets differ by layer and head: every head gets blocks
where they save most output error, at the same mean. At as many keys it then tries other grids and numbers of protected
last tiles, and takes one that reads the text, and its end, better in no more time. Heads that look something up are
idle on plain text, so prompts with questions are pieces too. Half of all is fitted on, the other half judges: KL to
dense, change in loss, answers, blocks kept, prefill time, beside the same blocks for every head. Stop it at any time:
what was measured is in --work, and the same command continues from there.
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
# On other text than the needles of our own evaluations, which are hidden in prose.
# The easier task first: where dense answers little, little can be seen to be lost.
TASKS = "niah-single:questions=8,haystack=code,niah-multikey:keys=8,questions=8,haystack=manuals"
NO = "no"


def add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune", help="budgets by layer and head for a model, on your own text", description=ABOUT, epilog=EXAMPLES
    )
    parser.add_argument("--model", metavar="NAME", required=True, help="as `closecall eval` takes it")
    parser.add_argument(
        "--text", metavar="PATH", type=Path, help=f"a file or a directory (default: {', '.join(KINDS)})"
    )
    parser.add_argument("--context", metavar="N", default="8k", help="tokens of a piece, k for 1024 (%(default)s)")
    parser.add_argument(
        "--pieces", metavar="N", default="6", help="most pieces of text; every second one judges (%(default)s)"
    )
    parser.add_argument(
        "--questions",
        metavar="TASK,...",
        default=TASKS,
        help="tasks for as many prompts with questions, or no (%(default)s)",
    )
    parser.add_argument(
        "--policy", metavar="POLICY", default="auto", help="scorer and protected tiles as in this one (%(default)s)"
    )
    parser.add_argument(
        "--grids",
        metavar="B/T,...",
        default="64/64,32/32",
        help="keys of a block / rows of a tile (%(default)s)",
    )
    parser.add_argument("--tiles", metavar="N,...", default="1,2", help="protected last tiles to try (%(default)s)")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--mean", metavar="B", type=float, help="mean tile budget (an eighth of the context's blocks)")
    goal.add_argument("--target-kl", metavar="X", type=float, help="the fewest blocks with at most this KL to dense")
    goal.add_argument("--speedup", metavar="Y", type=float, help="the most blocks at which prefill is Y times as fast")
    parser.add_argument("--dtype", metavar="TYPE", help="fp32, bf16 or fp16 (the type the weights were saved in)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("out/tuned.json"), help="(%(default)s)")
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path("out/tune"), help="(%(default)s)")
    parser.set_defaults(run=run_tune)


def run_tune(args: argparse.Namespace) -> None:
    from closecall.policy import Policy, as_policy

    from ..eval.spec import split
    from ..eval.subject import Subject
    from .fit import Fit, fit
    from .judge import Judge
    from .pieces import cut, halves, texts
    from .questions import prompts
    from .search import Goal, refine, search

    context, most = count("--context")(args.context), count("--pieces")(args.pieces)
    base = as_policy(args.policy)
    if base.scorer is None:
        raise ValueError(f"policy {base.name!r} ranks nothing, so it has no budgets to tune: use auto or quest")
    if base.share == "group":
        raise ValueError("tune fits a budget for each query head, and under share='group' heads share: leave it out")
    grids, tiles = _grids(args.grids), [count("--tiles")(n) for n in args.tiles.split(",")]
    n_tiles = -(-context // max(base.tile, *(tile for _, tile in grids)))
    if max(tiles) >= n_tiles:
        raise ValueError(
            f"--tiles {max(tiles)} would protect all {n_tiles} tiles of a prompt of {context} tokens: protect fewer, "
            "or take a longer --context"
        )
    n_blocks = -(-context // base.block)
    unset = args.mean is None and args.target_kl is None and args.speedup is None
    goal = Goal(n_blocks / 8 if unset else args.mean, args.target_kl, args.speedup)
    asks = [] if args.questions == NO else split(args.questions)
    output_file("--out", args.out)
    output_dir("--work", args.work)
    subject = Subject.open(args.model, dtype=args.dtype)
    subject.check_room(context)
    pieces = cut(subject.loaded.tokenizer, texts(args.text, KINDS), context, most)
    asked = prompts(subject.loaded, asks, context, len(pieces)) if asks else []
    fitting, judging = ([*text, *more] for text, more in zip(halves(pieces), halves(asked), strict=True))
    say(f"{len(fitting)} pieces of {context} tokens to fit on, {len(judging)} to judge by")
    judge = Judge(subject.loaded, judging, args.work, say)

    def fits(other: Policy) -> Fit:
        return fit(subject.loaded, fitting, other, args.work, say=say)

    tuned = refine(search(fits(base), base, goal, judge, context), goal, judge, fits, grids, tiles)
    names = {"fitted on": [p.name for p in fitting], "judged on": [p.name for p in judging]}
    tuned.chosen.policy.save(args.out, measured={"model": subject.loaded.label} | names | tuned.measured)
    print(tuned.table().text())
    written([args.out])


def _grids(text: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ValueError(f"--grids takes keys of a block / rows of a tile, such as 64/64,32/16, got {text!r}")
    return [(int(m[1]), int(m[2])) for m in found if m]


COMMANDS = (add_tune,)
