"""Options that several commands have, and how options are read and checked: lists, sizes, names, where results go."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from closecall.registry import unknown

from .numbers import TYPES

T = TypeVar("T")

# By the name that `shared` takes: the flags, and what argparse is told.
MODEL = "probe, probe:qwen3, probe:qwen3:SEED, smollm2, one of `closecall models`, a hub id or a directory"
SHARED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "model": (("--model",), {"metavar": "NAME", "default": "", "help": MODEL}),
    "models": (("--model", "--models"), {"metavar": "NAME,...", "default": "", "help": MODEL}),
    "task": (("--task",), {"metavar": "NAME", "default": "", "help": "a task, with options: niah-multikey:keys=4"}),
    "tasks": (
        ("--tasks", "--task"),
        {
            "metavar": "NAME,...",
            "default": "",
            "help": "tasks, with options: niah-multikey:keys=4; lm-eval:NAME for one of the installed lm-eval's",
        },
    ),
    "context": (("--context",), {"metavar": "N", "default": "8k", "help": "prompt length in tokens, k for 1024"}),
    "contexts": (
        ("--contexts", "--context"),
        {"metavar": "N,...", "default": "8k", "help": "prompt lengths in tokens, k for 1024"},
    ),
    "budget": (
        ("--budget",),
        {"metavar": "K", "default": "33", "help": "in blocks; tiles keep tile_factor times as many"},
    ),
    "budgets": (
        ("--budgets", "--budget"),
        {
            "metavar": "K,...",
            "default": "33",
            "help": "in blocks; tiles keep twice that, unless tile_factor says otherwise",
        },
    ),
    "n": (("--n",), {"metavar": "N", "default": "50", "help": "examples of each task and context"}),
    "seed": (("--seed",), {"metavar": "S", "type": int, "default": 0, "help": "seed of the examples"}),
    "dtype": (("--dtype",), {"metavar": "TYPE", "help": "fp32, bf16 or fp16 (the type the weights were saved in)"}),
    "store": (
        ("--store",),
        {"metavar": "FILE", "type": Path, "default": Path("out/eval.db"), "help": "store of results"},
    ),
    "jobs": (("--jobs",), {"metavar": "N", "default": "1", "help": "workers, each with a model of its own"}),
    "out": (("--out",), {"metavar": "DIR", "type": Path, "help": "where to write"}),
}


def shared(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Adds options of `SHARED` under the destination they are named by; `changes` are other defaults, or help texts.

    The default stands behind each help text.
    """
    for name in names:
        flags, about = SHARED[name]
        default, text = changes.get(name, about.get("default")), changes.get(f"{name}_help", about["help"])
        shown = f"{text} (%(default)s)" if default not in (None, "") else text
        parser.add_argument(*flags, dest=name, **about | {"default": default, "help": shown})


def need(**values: Any) -> None:
    """Checks that options without a default were typed."""
    for name, value in values.items():
        if not value:
            raise ValueError(f"--{name} is missing: name at least one")


def each(option: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """The comma-separated values of an option, in order, each once."""
    values = tuple(dict.fromkeys(read(item.strip()) for item in text.split(",") if item.strip()))
    if not values:
        raise ValueError(f"{option} names nothing: {text!r}")
    return values


MOST = 2**31  # of anything that is counted: far more than a machine can do, and SQLite can store it


def count(option: str) -> Callable[[str], int]:
    """Reads whole numbers from 1 up, `k` for 1024."""

    def read(text: str) -> int:
        digits, factor = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
        if not digits.isdigit() or int(digits) == 0:
            raise ValueError(f"{option} takes whole numbers from 1 up, like 128 or 32k, got {text!r}")
        if int(digits) * factor > MOST:
            raise ValueError(f"{option} takes whole numbers up to {MOST:,}, got {text!r}")
        return int(digits) * factor

    return read


def counts(option: str, text: str) -> tuple[int, ...]:
    return each(option, text, count(option))


def one_of(kind: str, known: Iterable[str]) -> Callable[[str], str]:
    """Reads one of the known names."""
    names = tuple(known)

    def read(text: str) -> str:
        if text not in names:
            raise unknown(kind, text, names)
        return text

    return read


def dtypes(option: str, text: str) -> tuple[str, ...]:
    return each(option, text, one_of(option, TYPES))


def threads(option: str, text: str) -> tuple[int, ...]:
    """Thread counts; `all` is what torch uses."""
    import torch

    return each(option, text, lambda item: torch.get_num_threads() if item == "all" else count(option)(item))


def positive(option: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{option} must be above 0, got {value}")
    return value


def output_dir(option: str, path: Path) -> Path:
    """Makes the directory and checks that it can be written to, before anything is measured for it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        wrong = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), path)
        raise ValueError(f"{option} {path}: {wrong} is a file; name a directory") from None
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be made: {error.strerror}; name another directory") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path} cannot be written to; name another directory")
    return path


def output_file(option: str, path: Path) -> Path:
    """Makes the file's directory and checks that the file can be written, before anything is measured for it."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory; name a file in it, like {path / 'result'}")
    output_dir(option, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written to; name another file")
    return path
