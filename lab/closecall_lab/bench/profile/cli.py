"""`closecall profile` and `closecall pareto`: their options, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from closecall.cli import Command, Parser

from ...spine import files
from ...spine.options import count, counts, dtypes, each, output_dir, shared, threads
from ...spine.progress import written

T = TypeVar("T")

ABOUT_PROFILE = """\
Shows where prefill time goes, and at which context sparse overtakes dense: the wall of a whole prefill split into
selection (summaries, ranking, rule, indices), attention, and the rest of the model; attention's share of it; what
Amdahl's law then allows; the crossover, with an interval. Always against two baselines: the model with torch SDPA,
and the model on our own kernel run dense. All take turns in one loop; finished cells are kept, and the same command
goes on where it was stopped.

With --shape, no weights are needed: one decoder layer of the model's true dimensions, with random weights, at the
true context, times its layers. Attention may be measured on some of the heads, the rest on some of the rows; the
output says exactly what was measured and what was multiplied.
"""
PROFILE_EXAMPLES = """\
examples:
  closecall profile --model smollm2 --contexts 2k,4k,8k --budget 8
  closecall profile --shape qwen2.5-7b-1m --contexts 32k,64k,128k --dense-heads 1 --rounds 3 --threads 1
  closecall profile --shape llama-3-8b --contexts 8k --head-groups all --rows all    a whole layer, in one piece
  closecall profile --report out/profile/profile-qwen2.5-7b-1m.json                  what is there, as Markdown
"""
ABOUT_PARETO = """\
Joins the accuracy of `closecall eval` with the wall ratios of `closecall profile`, by model, context, policy and
budget, in the layout of the paper's speed-quality table: context, accuracy, wall against dense, verdict. Draws the
frontier. What has only one of the two numbers is listed as such.
"""


def _all(option: str) -> Callable[[str], int | None]:
    """A whole number, or `all` for None."""
    return lambda text: None if text == "all" else count(option)(text)


def _given(text: str | None, read: Callable[[str], T]) -> T | None:
    return None if text is None else read(text)


def profile_options(parser: Parser) -> None:
    from .policies import PROFILED
    from .shapes import NAMES

    shared(
        parser, "model", "contexts", "budgets", "out", model=None, contexts=None, out=Path("out/profile"),
        contexts_help="lengths, k for 1024 (--model 2k,4k,8k; --shape 32k,64k,128k)", out_help="where results go",
    )  # fmt: skip
    parser.add_argument("--shape", metavar="NAME", help=f"{', '.join(NAMES)}, or the hub id of one")
    parser.add_argument("--report", metavar="FILE,...", help="print these results as Markdown, and measure nothing")
    parser.add_argument(
        "--policies", metavar="NAME,...", help=f"presets, with overrides like router:q=0.3 ({','.join(PROFILED)})"
    )
    parser.add_argument(
        "--dtypes", "--dtype", metavar="TYPE,...", help="of fp32, bf16, fp16 (fp32,bf16; a model's own)"
    )
    parser.add_argument("--threads", metavar="N,...", default="all", help="thread counts (%(default)s)")
    parser.add_argument("--rounds", metavar="N", default="5", help="runs of every contender (%(default)s)")
    parser.add_argument("--head-groups", metavar="G", default="1", help="key heads to measure, or `all` (%(default)s)")
    parser.add_argument("--query-heads", metavar="H", help="query heads of a group to measure (all of them)")
    parser.add_argument("--dense-heads", metavar="H", help="query heads to run the dense baselines on (as policies)")
    parser.add_argument(
        "--rows", metavar="R", default="2k", help="rows to run the rest of the layer on, or `all` (%(default)s)"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (the best there is)")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")


def profile(args: argparse.Namespace) -> None:
    if args.report is not None:
        from .tables import document

        print(document(each("--report", args.report, Path)), end="")
        return
    if (args.model is None) == (args.shape is None):
        raise ValueError("name either --model or --shape: `closecall profile --shape qwen2.5-7b-1m` needs no weights")
    from .. import base

    make = _shape if args.shape is not None else _model
    bench = make(args)
    base.run(bench, output_dir("--out", args.out), fresh=args.fresh)


def _shared(args: argparse.Namespace, contexts: str) -> dict[str, Any]:
    """What all kinds of profile take, read and checked."""
    from ..validate.device import pick
    from . import policies as read

    return {
        "contexts": counts("--contexts", args.contexts or contexts),
        "policies": read.read(args.policies or ",".join(read.PROFILED), counts("--budgets", args.budgets)),
        "threads": threads("--threads", args.threads),
        "rounds": count("--rounds")(args.rounds),
        "device": pick(args.device),
    }


def _model(args: argparse.Namespace) -> Any:
    shared = _shared(args, "2k,4k,8k")
    types = dtypes("--dtypes", args.dtypes) if args.dtypes else (None,)
    if len(types) > 1:
        raise ValueError(f"--dtypes {args.dtypes}: a model is loaded in one type; run the command once for each")
    from closecall.models.load import own_name

    from .model_run import ModelProfile, load

    loaded = load(args.model, types[0], shared["device"])
    return ModelProfile(loaded=loaded, name=f"profile-{files.slug(own_name(loaded.name))}", **shared)


def _heads(args: argparse.Namespace) -> dict[str, int | None]:
    return {
        "groups": _all("--head-groups")(args.head_groups),
        "query_heads": _given(args.query_heads, count("--query-heads")),
        "dense_heads": _given(args.dense_heads, count("--dense-heads")),
    }


def _shape(args: argparse.Namespace) -> Any:
    from . import shapes
    from .shape_run import ShapeProfile

    shape = shapes.shape(args.shape)
    shared = _shared(args, "32k,64k,128k")
    heads, rows = _heads(args), _all("--rows")(args.rows)

    def part(context: int) -> shapes.LayerPart:
        return shapes.measured(shape, **heads, rows=rows, context=context)

    types = dtypes("--dtypes", args.dtypes or "fp32,bf16")
    return ShapeProfile(shape=shape, part=part, dtypes=types, name=f"profile-{shape.name}", **shared)


def pareto_options(parser: Parser) -> None:
    shared(
        parser, "store", "models", "out", models=None, out=Path("out/pareto"),
        store_help="of `closecall eval`", models_help="only these (all)",
    )  # fmt: skip
    parser.add_argument("--profile", metavar="FILE,...", help="results of `closecall profile` (all in out/profile)")


def pareto(args: argparse.Namespace) -> None:
    from ...eval.store import Store
    from . import pareto as joining

    if args.profile is None:
        paths = tuple(sorted(Path("out/profile").glob("profile-*.json")))
        if not paths:
            raise ValueError("out/profile holds no profile: run `closecall profile`, or name one with --profile")
    else:
        paths = each("--profile", args.profile, Path)
    profiles = joining.walls(paths)
    output_dir("--out", args.out)
    models = None if args.models is None else each("--model", args.models, str)
    with Store(args.store, create=False) as store:
        joined = joining.join(store, profiles, models, everything=args.profile is not None)
    page = joining.page(joined)
    print(page.text(), end="")
    numbers = files.write(args.out / "pareto.json", joining.to_json(joined.groups))
    written([*page.write(args.out, "pareto"), numbers])


PARETO = Command(
    "pareto", "accuracy and speed in one table: which policy is on the frontier", ABOUT_PARETO, pareto_options, pareto
)
PROFILE = Command(
    "profile", "where prefill time goes, and from which context on sparse is faster", ABOUT_PROFILE,
    profile_options, profile, PROFILE_EXAMPLES,
)  # fmt: skip
COMMANDS = (PROFILE, PARETO)
