"""The kinds of tasks that `eval` runs, behind one interface: prompts with questions, texts, and lm-eval's documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .. import tasks
from ..tasks.base import BaseTask
from ..tasks.example import Example
from ..tasks.text import Text
from . import lm_eval
from .harness import LmEval
from .matched import Applied
from .measure import measure
from .reading import Texts
from .store import Run
from .subject import Subject


class Opened(Protocol):
    """A task on one model: its examples, and a policy's run on one of them."""

    def examples(self, context: int, seed: int) -> Iterator[Example]: ...

    def measure(self, example: Example, applied: Applied) -> Run: ...


class Kind(Protocol):
    """A task as it is asked for. `str` is its name in results, by which `parse` finds it again."""

    @property
    def own_lengths(self) -> bool:
        """Whether its examples have lengths of their own, so that contexts do not apply."""

    def check(self) -> None:
        """Raises an error, before a model is loaded, if the task cannot be had."""

    def on(self, subject: Subject) -> Opened: ...


@dataclass(frozen=True)
class Ours:
    """A task of `closecall_lab.tasks`, which was checked when it was made."""

    task: BaseTask
    own_lengths: bool = False

    def __str__(self) -> str:
        return str(self.task)

    def check(self) -> None:
        pass

    def on(self, subject: Subject) -> Opened:
        return Texts(self.task, subject) if isinstance(self.task, Text) else Prompts(self.task, subject)


@dataclass(frozen=True)
class Prompts:
    """Prompts with questions, made for the model's tokenizer."""

    task: BaseTask
    subject: Subject

    def examples(self, context: int, seed: int) -> Iterator[Example]:
        loaded = self.subject.loaded
        return self.task.examples(loaded.tokenizer, context, 2**31, seed, wrap=loaded.prompt)

    def measure(self, example: Example, applied: Applied) -> Run:
        return measure(self.subject, self.task, example, applied)


def parse(name: str) -> Kind:
    """The task of that name, with its options: ours, or one of lm-eval's behind its prefix."""
    return LmEval.parse(name) if name.startswith(lm_eval.PREFIX) else Ours(tasks.get(name))
