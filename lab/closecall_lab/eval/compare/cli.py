"""`closecall compare` and `closecall compare capture`: their options, and what they print."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from closecall.cli import Command, Commands, Parser

from ...spine import figure, files
from ...spine.options import count, counts, each, need, output_dir, shared
from ...spine.progress import say, written

ABOUT = """\
Runs policies on the same examples and tests them against each other only where they kept the same number of
blocks, as measured, to half a percent on every example. It prints which policy answers more (wins, losses,
tests over whole contexts), what selection costs in time and in stored vectors, and, with --captured, what each
policy keeps of captured layers: softmax mass, error of the output, gold blocks.

Answers are kept in the store of `closecall eval`. Stop it at any time: the same command continues. Examples with
even numbers are for choosing; odd ones (--split final) are for one look at the end. Policies are written as for
`closecall eval`. For each router its /matched control is added: uniform top-k that keeps, on each example, as
many blocks as the router did.
"""
EXAMPLES = """\
examples:
  closecall compare --model probe --tasks probe-needle --contexts 4k --budgets 4 --n 50 \\
      --policies quest,topk,router-on-quest --out out/compare
  closecall compare capture --model smollm2 --tasks niah-single:haystack=prose --contexts 4k --n 4 --out out/capture
  closecall compare --captured out/capture --policies quest,topk --budgets 8 --split choose
"""
CAPTURE = """\
Writes the queries, keys and values of every full-attention layer of each prompt to a directory, one file for
each layer and prompt, as the model computes them densely: what `closecall compare --captured` judges policies on.
It says how much it will write, and refuses before it begins if that is too much. Stop it at any time: the same
command continues with the first unfinished prompt.
"""
TIMED = (8, 2, 64)  # query heads, key heads and head size of the tensors to time on where none are captured


def options(parser: Parser) -> None:
    shared(parser, "models", "tasks", "contexts", contexts="4k")
    parser.add_argument(
        "--policies", metavar="NAME,...", default="quest,topk,router-on-quest", help="policies to compare (%(default)s)"
    )
    parser.add_argument("--against", metavar="NAME,...", default="quest", help="compare all with these (%(default)s)")
    shared(parser, "budgets", "n", "seed", "dtype", "store", "jobs", store_help="where answers live")
    parser.add_argument(
        "--split", metavar="PART", default="choose", help="which examples: choose or final (%(default)s)"
    )
    parser.add_argument("--captured", metavar="DIR", type=Path, help="judge policies on these captured layers too")
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=5.0, help="for timing selection; 0: no timing (%(default)s)"
    )
    parser.add_argument("--by-layer", action="store_true", help="also print captured layers one by one")
    shared(parser, "out", out_help="also write compare.md, compare.json, compare.png")
    _add_capture(parser.add_subparsers(title="before comparing", metavar="COMMAND"))


def _add_capture(commands: Commands) -> None:
    parser = commands.add_parser("capture", help="write prompts' queries, keys and values", description=CAPTURE)
    shared(
        parser, "model", "tasks", "contexts", "n", "seed", "dtype", "out", contexts="4k", n="2", out=Path("out/capture")
    )
    parser.add_argument("--layers", metavar="I,...", help="only these full-attention layers (all)")
    parser.add_argument("--save-as", metavar="TYPE", help="fp32, bf16 or fp16 (the model's type)")
    parser.add_argument(
        "--max-gb", metavar="GB", type=float, default=20.0, help="write no more than this (%(default)s)"
    )
    parser.set_defaults(run=run_capture)


def run_capture(args: argparse.Namespace) -> None:
    from ..spec import split
    from ..subject import Subject
    from . import capture

    need(model=args.model, tasks=args.tasks)
    if not args.max_gb > 0:
        raise ValueError(f"--max-gb must be above 0, got {args.max_gb!r}")
    wanted = {
        "task_names": split(args.tasks),
        "contexts": counts("--contexts", args.contexts),
        "n": count("--n")(args.n),
        "seed": args.seed,
        "layers": None if args.layers is None else each("--layers", args.layers, _index),
        "save_as": args.save_as,
        "most_bytes": int(args.max_gb * 2**30),
    }
    made = capture.capture(Subject.open(args.model, dtype=args.dtype), args.out, say=say, **wanted)
    there = len(capture.Capture.open(args.out).prompts())
    print(f"{made} prompts captured, {there} are in {args.out}")


def _index(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"--layers takes layer numbers like 0,5,10, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> None:
    import closecall

    from ..spec import Spec, split
    from ..store import Store
    from . import report, ring
    from .capture import Capture
    from .quality import Findings, check_part, judge_all

    check_part(args.split)
    if not 0 <= args.seconds < math.inf:
        raise ValueError(f"--seconds must be a number of at least 0, got {args.seconds!r}")
    if args.out is not None:
        output_dir("--out", args.out)
    asked = bool(args.models or args.tasks)
    if not asked and args.captured is None:
        raise ValueError("nothing to do: name --model and --tasks, or --captured")
    policies, against = ([Spec.parse(text) for text in split(x)] for x in (args.policies, args.against))
    specs = ring.entrants(policies, against)
    grid = _grid(args, specs, asked)
    capture = None if args.captured is None else Capture.open(args.captured)
    for note in grid.notes if not asked else []:  # else they are said when the grid is run
        say(f"warning: {note}")
    settings: dict[str, Any] = {
        "closecall": closecall.__version__,
        "split": f"{args.split} ({'even' if args.split == 'choose' else 'odd'} example numbers)",
        "policies": ", ".join(map(str, policies)),
        "against": ", ".join(map(str, against)),
        "budgets": args.budgets,
    }
    answers, captured = None, None
    tables = []
    if asked:
        settings |= {"model": args.models, "tasks": args.tasks, "contexts": args.contexts, "n": args.n}
        settings |= {"seed": args.seed}
        with Store(args.store) as store:
            answers = ring.answers(grid, store, against, jobs=count("--jobs")(args.jobs))
        tables += report.answer_tables(answers, args.split)
    layers = []
    if capture is not None:
        settings |= {"captured": f"{args.captured} of {capture.manifest['model']}"}
        with Findings(args.captured / "quality.jsonl") as findings:
            rows = judge_all(capture, grid.variants, part=args.split, findings=findings, say=say)
        captured = ring.Captured(rows, [str(s) for s in against])
        tables += report.captured_tables(captured, f"Captured layers of {capture.manifest['model']}, {args.split} part")
        layers = report.layer_tables(captured)
    costs = _costs(args, grid, capture)
    if costs[0]:
        tables.append(report.cost_table(*costs))
    for table in [*tables, *(layers if args.by_layer else [])]:
        print(table.text() + "\n")
    if args.out is not None:
        data = report.as_json(settings, answers, captured, costs[0])
        paths = [
            files.write(args.out / "compare.md", report.markdown(settings, [*tables, *layers])),
            files.write(args.out / "compare.json", data),
        ]
        written([*paths, *(figure.save(_drawn(answers), args.out) if answers is not None else [])])


def _drawn(answers: Any) -> dict[str, Any]:
    """Draws the answers; nothing if no policy ran everywhere."""
    from .figure import picture

    models = len({g.model for g in answers.groups})
    return {"compare": picture(answers.tallies, models)} if answers.tallies else {}


def _grid(args: argparse.Namespace, specs: list[Any], asked: bool) -> Any:
    """Reads the grid from the options; without a model, only its policies and budgets are used."""
    from ..spec import split
    from .ring import RingGrid

    if asked:
        need(model=args.models, tasks=args.tasks)
    return RingGrid(
        models=tuple(split(args.models)) or ("none",),
        tasks=tuple(split(args.tasks)) or ("niah-single",),
        contexts=counts("--contexts", args.contexts),
        specs=tuple(specs),
        budgets=counts("--budgets", args.budgets),
        n=count("--n")(args.n),
        seed=args.seed,
        dtype=args.dtype,
        part=args.split,
    )


def _costs(args: argparse.Namespace, grid: Any, capture: Any) -> tuple[list[Any], str]:
    """Times selection on a captured layer if there is one, else on standard normal numbers at the longest context."""
    import torch

    from ...spine.inputs import qkv
    from ...spine.numbers import threads
    from . import cost

    if not args.seconds:
        return [], ""
    with_threads = threads(torch.get_num_threads())
    if capture is not None:
        prompt = max(capture.prompts(), key=lambda p: p.tokens)
        number = prompt.layers[len(prompt.layers) // 2]
        layer = prompt.load(number)
        q, k, scale = layer.q, layer.k, layer.scale
        where = f"layer {number} of a captured prompt of {prompt.tokens} tokens, {with_threads}"
    else:
        heads, kv_heads, dim = TIMED
        tokens = max(grid.contexts)
        q, k, _ = qkv(heads, kv_heads, tokens, tokens, dim, "fp32")
        scale = dim**-0.5
        where = f"{tokens} normal tokens, {heads} query and {kv_heads} key heads of {dim}, fp32, {with_threads}"
    variants = []
    for spec, budget in grid.variants:
        if spec.policy(budget).rule.made_for() is None:
            variants.append((spec, budget))
        else:
            say(f"{spec} is not timed: it has a threshold for each layer of its model; time its router instead")
    return cost.costs(variants, q, k, scale, seconds=args.seconds), where


COMPARE = Command(
    "compare", "which selector wins at equal measured budget, and what it costs", ABOUT, options, run, EXAMPLES
)
COMMANDS = (COMPARE,)
