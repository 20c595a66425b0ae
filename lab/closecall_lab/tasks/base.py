"""What all tasks share: options in their names, and examples made one by one from a seed."""

from __future__ import annotations

import dataclasses
import inspect
import random
import types
import typing
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from closecall.registry import Component, Registry, unknown

from .example import Example, Question, Wrap
from .fit import Room
from .scoring import same_words, share_found

YES_NO = {"yes": True, "no": False}


@dataclass(frozen=True, kw_only=True)
class BaseTask(Component):
    """A source of examples and the judge of the answers. Its dataclass fields are its options: `str` writes those that
    are not the default, and `tasks.get` makes the task of that again.

    `chat` puts the prompt into the tokenizer's chat template; by default it does where there is one.
    """

    chat: bool | None = None

    def __str__(self) -> str:
        return self.written()

    def written(self, *, without: str = "") -> str:
        """Name and options, the task's own before those it shares with others."""
        fields = {f.name: f for f in dataclasses.fields(self)}
        named = dict.fromkeys(name for cls in type(self).__mro__ for name in inspect.get_annotations(cls))
        order = (fields[name] for name in named if name in fields)
        given = ((f.name, getattr(self, f.name)) for f in order if getattr(self, f.name) != f.default)
        options = ",".join(f"{name}={_text(value)}" for name, value in given if name != without)
        return f"{self.name}:{options}" if options else self.name

    @abstractmethod
    def examples(
        self, tokenizer: Any, context: int, n: int, seed: int, *, wrap: Wrap | None = None
    ) -> Iterator[Example]:
        """Up to `n` examples whose prompt and answer fill `context` tokens.

        The same arguments give the same examples, and example i does not depend on `n`. A chat model's prompt goes
        through `wrap`, or through the tokenizer's chat template if there is no `wrap`.
        """

    def score(self, example: Example, question: Question, output: str) -> float:
        """How right the model's words are, from 0 to 1: the share of the answers found in the output; all or nothing
        for one that was teacher-forced."""
        if question.at is not None:
            return same_words(question.answers[0], output)
        return share_found(question.answers, output)


@dataclass(frozen=True, kw_only=True)
class Generated(BaseTask):
    """A task that makes its examples up. Each has a source of chance of its own, so none depends on another."""

    def examples(
        self, tokenizer: Any, context: int, n: int, seed: int, *, wrap: Wrap | None = None
    ) -> Iterator[Example]:
        check_counts(context, n, seed)
        room = Room(tokenizer, wrap=wrap, chat=self.chat)
        for i in range(n):
            key = f"{self}/{context}/seed{seed}/{i}"
            yield self.make(room, context, key, random.Random(key))

    @abstractmethod
    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        """One example."""


TASKS: Registry[BaseTask] = Registry("task")


def check_counts(context: int, n: int, seed: int) -> None:
    for name, value, least in (("context", context, 1), ("n", n, 0), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_least(task: BaseTask, **least: int) -> None:
    """The options that are counts: `check_least(self, hops=1)`."""
    for name, low in least.items():
        if getattr(task, name) < low:
            raise ValueError(f"{name} of task {task.name!r} must be at least {low}, got {getattr(task, name)}")


def build(name: str, options: dict[str, Any]) -> BaseTask:
    cls = TASKS[name]
    return cls(**read_options(cls, name, options))


def read_options(cls: type[Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the options of a task, which are its dataclass fields with a default, and reads those that are text."""
    wanted = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING]
    for key in options:
        if key not in known:
            raise unknown(f"option of task {name!r}", key, known)
    return {key: _read(f"{key} of task {name!r}", value, wanted[key]) for key, value in options.items()}


def _text(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _read(what: str, value: Any, kind: Any) -> Any:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if isinstance(value, str) and bool in kinds:
        if value not in YES_NO:
            raise ValueError(f"{what} is yes or no, got {value!r}")
        return YES_NO[value]
    if isinstance(value, str) and int in kinds:
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{what} must be a whole number, got {value!r}") from None
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise TypeError(f"{what} must be {names}, got {value!r}")
    return value
