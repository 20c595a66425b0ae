"""Tasks: examples in, scores out. `get("niah-multikey:keys=4,haystack=prose")` makes one from its name."""

from __future__ import annotations

from typing import Any

from closecall.registry import scan

from .base import TASKS, BaseTask, build
from .example import Encoded, Example, Question, answer_tokens, encode, encode_example, gold_blocks, tokens_of
from .scoring import choice_in, choice_tokens, choose

__all__ = [
    "BaseTask",
    "Encoded",
    "Example",
    "Question",
    "answer_tokens",
    "choice_in",
    "choice_tokens",
    "choose",
    "encode",
    "encode_example",
    "get",
    "gold_blocks",
    "names",
    "tokens_of",
]

scan(__name__, __path__)


def names() -> list[str]:
    return TASKS.names()


def get(name: str, **options: Any) -> BaseTask:
    """The task of that name: `NAME` or `NAME:option=value,option=value`. Options may be given as keywords too.

    >>> str(get("niah-multikey:keys=4", haystack="prose"))
    'niah-multikey:keys=4,haystack=prose'
    """
    plain, _, written = name.partition(":")
    if plain == "lm-eval":
        raise ValueError(
            f"{name!r} is answered and scored by lm-eval itself: `closecall eval --tasks {name}`, or "
            f"closecall_lab.eval.lm_eval in Python"
        )
    for piece in filter(None, written.split(",")):
        key, equals, value = piece.partition("=")
        if not equals or not value:
            raise ValueError(f"options of a task are written NAME:option=value,option=value, got {piece!r} in {name!r}")
        if key in options:
            raise ValueError(f"option {key!r} of task {plain!r} is given twice")
        options[key] = value
    return build(plain, options)
