"""`closecall explain`: its options, and what it prints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from closecall.cli import Command, Parser

from ..spine.options import count, need, output_file, shared
from ..spine.progress import say

if TYPE_CHECKING:
    from closecall.models.load import LoadedModel
    from closecall.policy import Policy

    from .prompt import Prompt


ABOUT = """\
Runs a prompt through a model once per policy and writes one page that shows what attention kept, dropped and
nearly kept: the prompt as a strip of blocks, the map of tiles by blocks of every layer and head, each tile's
ranking with the cut in it, the closest calls with what they cost, two policies side by side. The page needs no
network and no other file; send it to a colleague.

The prompt is a file, with --question behind it (or in it: then that is where it is asked), or the first example
of a task. A budget is given with its policy, in blocks: tiles keep twice that, unless tile_factor says otherwise.
"""
EXAMPLES = """\
examples:
  closecall explain --model smollm2 --prompt report.txt --question "Who signed it?" --answer "Ada" --out page.html
  closecall explain --model probe --task probe-needle --context 8k --policy topk:budget=4,auto:budget=4
  closecall explain --model smollm2 --prompt long.txt --no-truth --layers 0-9 --out page.html
in Python: closecall.explain(model, inputs, "auto").save("page.html")
"""
TASK = "instead of --prompt: the first example of this task"


def options(parser: Parser) -> None:
    shared(parser, "model", "task", "context", "seed", task_help=TASK, context_help="of --task", seed_help="of --task")
    parser.add_argument("--prompt", metavar="FILE", type=Path, help="a text file; - reads standard input")
    parser.add_argument(
        "--question", metavar="TEXT", default="", help="added after the prompt, unless the prompt holds it"
    )
    parser.add_argument("--answer", metavar="TEXT", default="", help="the expected answer: the page marks its blocks")
    parser.add_argument(
        "--policy", "--policies", metavar="P[,P2]", default="auto",
        help="one, or two side by side: auto:budget=8, topk, a saved policy's file (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--layers", metavar="N,...", default="", help="layers to show: 0-7,12 (all)")
    parser.add_argument("--tokens", metavar="N", type=int, default=32, help="most tokens of the answer (%(default)s)")
    parser.add_argument(
        "--no-truth", action="store_true", help="leave true masses out: they need dense attention, slow on long prompts"
    )
    parser.add_argument("--dtype", metavar="TYPE", help="fp32, bf16 or fp16 (the type the weights were saved in)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("out/explain.html"), help="(%(default)s)")


def run(args: argparse.Namespace) -> None:
    from ..eval.subject import Subject
    from .run import explain_prompt

    text = _checked(args)
    layers = layer_numbers(args.layers) if args.layers else None
    policies = read_policies(args.policy)
    loaded = Subject.open(args.model, dtype=args.dtype).loaded
    prompt = _of_task(args, loaded) if args.task else _of_text(args, text, loaded)
    say(f"{len(prompt.ids):,} tokens")
    made = explain_prompt(
        loaded, loaded.tokenizer, prompt, policies,
        layers=layers, truth=not args.no_truth, new_tokens=args.tokens, say=say,
    )  # fmt: skip
    path = made.save(args.out)
    print(made)
    say(f"written to {path}, {path.stat().st_size / 1e6:.1f} MB")


def _checked(args: argparse.Namespace) -> str:
    """The prompt's text, empty for a task; what was asked for in vain is said before a model is loaded."""
    need(model=args.model)
    if args.tokens < 0:
        raise ValueError(f"--tokens takes a number of tokens, 0 for no answer, got {args.tokens}")
    output_file("--out", args.out)
    if bool(args.prompt) == bool(args.task):
        raise ValueError("give the prompt's file with --prompt, or a --task to take an example from")
    if args.task:
        if args.question or args.answer:
            raise ValueError(f"{args.task} brings its own question and answer: drop --question and --answer, or --task")
        return ""
    text = sys.stdin.read() if str(args.prompt) == "-" else _read(args.prompt)
    if not (text + args.question).strip():
        raise ValueError(f"{args.prompt} is empty: there is nothing to explain")
    return text


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"no prompt file {str(path)!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first") from None


def _of_text(args: argparse.Namespace, text: str, loaded: LoadedModel) -> Prompt:
    from .prompt import from_text

    question = args.question.strip()
    whole = text if question in text else f"{text.rstrip()}\n\n{question}"
    templated = getattr(loaded.tokenizer, "chat_template", None) is not None
    return from_text(loaded.tokenizer, loaded.prompt(whole), templated=templated, question=question, answer=args.answer)


def _of_task(args: argparse.Namespace, loaded: LoadedModel) -> Prompt:
    from .. import tasks
    from .prompt import from_text

    context = count("--context")(args.context)
    task = tasks.get(args.task)
    example = next(iter(task.examples(loaded.tokenizer, context, 1, args.seed, wrap=loaded.prompt)), None)
    if example is None:
        raise ValueError(f"{task} has no prompt at {context} tokens")
    asked = example.questions[0]
    return from_text(
        loaded.tokenizer, example.prompt, templated=example.templated, answer=asked.answers[0], gold=asked.gold
    )


def read_policies(text: str) -> list[tuple[str, Policy]]:
    """Each with the name it goes by on the page: what was typed, of a saved policy only the file's name."""
    from closecall.policy import parse

    from ..eval.spec import split

    return [(Path(one).name if one.endswith(".json") else one, parse(one)) for one in split(text)]


def layer_numbers(text: str) -> list[int]:
    """`0-7,12` as numbers, in order."""
    numbers: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and (not last.isdigit() or int(last) < int(first))):
            raise ValueError(f"--layers takes numbers and ranges like 0-7,12, got {part!r}")
        numbers.update(range(int(first), int(last or first) + 1))
    if not numbers:
        raise ValueError(f"--layers names nothing: {text!r}")
    return sorted(numbers)


EXPLAIN = Command(
    "explain",
    "see, on one page, what a prompt's attention kept, dropped and nearly kept",
    ABOUT,
    options,
    run,
    EXAMPLES,
)
COMMANDS = (EXPLAIN,)
