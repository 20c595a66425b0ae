"""The probes' own tasks, in the words that the probes know: needles and pointer chases of `closecall_lab.probes.text`.

Questions whose answers stand in the prompt are teacher-forced: one prefill answers many of them, and every look-up of a
chase is made by the policy. (Generated answers are decoded densely: there only the first look-up is the policy's.)
"""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from ..probes import text
from ..probes.words import IDS, VOCABULARY
from .base import TASKS, Generated, check_least
from .example import Example, Question, Span
from .fit import Room
from .scoring import same_words

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Probe(Generated):
    fewer: ClassVar[str]  # what to ask for less of where the context is too short

    @property
    @abstractmethod
    def where(self) -> text.Where: ...

    @property
    @abstractmethod
    def answer_tokens(self) -> int:
        """The most tokens a generated answer takes, with its full stop."""

    @abstractmethod
    def passage(self, chance: np.random.Generator, length: int) -> text.Passage: ...

    @property
    def forced(self) -> bool:
        """Whether answers stand in the prompt."""
        return self.where != "end"

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        _check_words(room.tokenizer)
        at_end = self.where == "end"
        tokens = 0 if self.forced else self.answer_tokens
        answer = self.answer_tokens - 1 if at_end and self.forced else tokens
        try:
            made = self.passage(_generator(key), context - answer)
        except text.TooShortError as error:  # by the length of the passage, which nobody typed
            raise ValueError(
                f"task {str(self)!r} needs a context of at least {context + error.missing} tokens, got {context}: "
                f"give more, or ask for fewer {self.fewer}"
            ) from None
        prompt = made.prompt_text(made.questions[0]) if at_end else made.text
        if at_end and self.forced:
            prompt += " " + text.words(made.questions[0].answer)
        spans = _spans(prompt)
        return Example(
            task=str(self),
            key=key,
            context=context,
            prompt=prompt,
            questions=tuple(_question(q, spans, forced=self.forced) for q in made.questions),
            max_new_tokens=tokens,
            meta={"prompt_tokens": context - tokens},
            templated=room.templated,
        )

    def score(self, example: Example, question: Question, output: str) -> float:
        """1 if the answer arrives at the value; a teacher-forced one has to be right in every word."""
        if question.at is not None:
            return same_words(question.answers[0], output)
        asked = text.Question(key="", value=question.answers[0], position=0, answer=(), gold=())
        return float(text.answered(asked, output))


@TASKS.register("probe-needle")
@dataclass(frozen=True, kw_only=True)
class ProbeNeedle(Probe):
    """`keys` needles in filler, one of them asked for at the end and its value generated.

    With more `questions` than one, so many are asked for in a row at the end, one in every 64 tokens, teacher-forced.
    """

    fewer: ClassVar[str] = "keys or questions"
    keys: int = 24
    questions: int = 1

    def __post_init__(self) -> None:
        check_least(self, keys=1, questions=1)
        if self.questions > self.keys:
            raise ValueError(f"{self.questions} questions need as many keys, and there are {self.keys}: give more keys")

    @property
    def where(self) -> text.Where:
        return "end" if self.questions == 1 else "row"

    @property
    def answer_tokens(self) -> int:
        return 2

    def passage(self, chance: np.random.Generator, length: int) -> text.Passage:
        return text.needles(chance, length, self.keys, n_questions=self.questions, where=self.where)


@TASKS.register("probe-scattered")
@dataclass(frozen=True, kw_only=True)
class ProbeScattered(ProbeNeedle):
    """`keys` needles in filler, `questions` of them asked for somewhere behind their needle."""

    questions: int = 8

    @property
    def where(self) -> text.Where:
        return "scattered"


@TASKS.register("probe-chase")
@dataclass(frozen=True, kw_only=True)
class ProbeChase(Probe):
    """`chains` pointer chases of `hops` hops. The answer is the whole way, so that each word of it is one look-up.

    At the end `questions` of them are asked for in a row, one in every 64 tokens, teacher-forced; with `scattered`,
    along the way. One at the end can also be generated: `generate`.
    """

    fewer: ClassVar[str] = "hops, chains or questions"
    hops: int = 3
    chains: int = 6
    generate: bool = False
    scattered: bool = False
    questions: int = 1

    def __post_init__(self) -> None:
        check_least(self, hops=1, chains=1, questions=1)
        if self.questions > self.chains:
            raise ValueError(f"{self.questions} questions need as many chains, and there are {self.chains}: give more")
        if self.generate and self.scattered:
            raise ValueError(
                "scattered answers stand in the prompt and cannot be generated: drop one of the two options"
            )
        if self.generate and self.questions > 1:
            raise ValueError(
                f"the answers of {self.questions} questions stand in the prompt and cannot be generated: "
                f"ask one question, or drop generate"
            )

    @property
    def where(self) -> text.Where:
        if self.scattered:
            return "scattered"
        return "end" if self.questions == 1 else "row"

    @property
    def forced(self) -> bool:
        return not self.generate

    @property
    def answer_tokens(self) -> int:
        return 2 * self.hops + 2

    def passage(self, chance: np.random.Generator, length: int) -> text.Passage:
        return text.pointer_chase(
            chance, length, self.hops, n_chains=self.chains, n_questions=self.questions, where=self.where
        )


def _check_words(tokenizer: Any) -> None:
    if tokenizer.get_vocab() != IDS:
        raise ValueError(
            f"this task is written in the probes' {len(VOCABULARY)} words, and the tokenizer is not theirs: "
            f"run it on a probe, and give other models niah-single, niah-multikey or pointer-chase"
        )


def _generator(key: str) -> np.random.Generator:
    import numpy

    return numpy.random.default_rng(list(hashlib.sha256(key.encode()).digest()))


def _spans(prompt: str) -> list[Span]:
    """The characters of each token: the words, one blank apart, behind a start token of none."""
    ends = accumulate((len(word) for word in prompt.split(" ")), lambda end, length: end + 1 + length)
    return [(0, 0), *((end - len(word), end) for word, end in zip(prompt.split(" "), ends, strict=True))]


def _question(asked: text.Question, spans: list[Span], *, forced: bool) -> Question:
    gold = tuple((spans[start][0], spans[end - 1][1]) for start, end in asked.gold)
    if not forced:
        return Question((asked.value,), gold)
    return Question((text.words(asked.answer),), gold, at=spans[asked.position][0])
