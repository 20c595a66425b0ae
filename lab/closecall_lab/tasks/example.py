"""What a task yields: examples with their questions.

An example knows where in its prompt the evidence lies, in characters; `gold_blocks` turns that into key blocks through
the tokenizer's offsets, so that a selector can be judged apart from the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """One thing asked of an example, in one of three ways.

    By default the question stands at the prompt's end, and the answer is generated. With `at`, the answer is already in
    the prompt from that character on, and counts as given if the model's most likely tokens there are the answer's.
    With `ask`, the prompt is a context that many questions share: `ask` continues it, up to where the answer begins,
    and greedy decoding is followed as long as it gives the (only) answer.

    `gold` are the character spans of the prompt that the answer depends on, in the order they are needed: one for each
    hop of a chase. It is empty where nobody knows them.
    """

    answers: tuple[str, ...]
    gold: tuple[Span, ...] = ()
    at: int | None = None
    ask: str = ""

    @property
    def continuation(self) -> str:
        """What a model that answers right says next: after a blank, or right behind the quote that `ask` opens."""
        return self.answers[0] if self.ask.endswith("`") else f" {self.answers[0]}"


@dataclass(frozen=True)
class Example:
    """One prompt, exactly as the model gets it, and what is asked in it.

    `key` names it whatever its content (`niah-single/8192/seed0/17`); `digest()` is its content's address. `context` is
    the room for prompt and answer together, in tokens. `choices` are the letters of a multiple choice, which can be
    scored by their logits too. `templated` says that a chat template made the prompt, special tokens included. A text
    that is only read has no questions.
    """

    task: str
    key: str
    context: int
    prompt: str
    questions: tuple[Question, ...]
    max_new_tokens: int
    choices: tuple[str, ...] = ()
    meta: Mapping[str, JSON] = field(default_factory=dict, hash=False)
    templated: bool = False

    def __post_init__(self) -> None:
        if not self.questions and self.max_new_tokens:
            raise ValueError(f"{self.key} asks nothing: give it at least one Question, or max_new_tokens=0 for a text")
        for question in self.questions:
            if not question.answers or not all(question.answers):
                raise ValueError(f"{self.key} has a question without an answer: {question.answers!r}")
            for start, end in question.gold:
                if not 0 <= start < end <= len(self.prompt):
                    raise ValueError(
                        f"{self.key} has the gold span {(start, end)}, but its prompt has {len(self.prompt)} characters"
                    )
            if question.ask and (question.at is not None or len(question.answers) != 1):
                raise ValueError(f"{self.key}: a question with `ask` has one answer and no `at`, got {question!r}")
            if question.at is not None and not self.prompt.startswith(question.answers[0], question.at):
                raise ValueError(
                    f"{self.key} has no answer {question.answers[0]!r} at character {question.at}: "
                    f"a question with `at` needs its first answer there"
                )
        if len({bool(question.ask) for question in self.questions}) > 1:
            raise ValueError(f"{self.key}: either all questions continue the prompt (`ask`) or none does")

    @property
    def shared(self) -> bool:
        """Whether the prompt is a context that every question continues."""
        return bool(self.questions and self.questions[0].ask)

    def digest(self) -> str:
        """The sha256 of everything in it."""
        content = dataclasses.asdict(self)
        for question in content["questions"]:
            if not question["ask"]:  # came later than the first stored results, whose addresses stay
                del question["ask"]
        text = json.dumps(content, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


class Wrap(Protocol):
    """A question as a chat model wants it: `LoadedModel.prompt` is one, with the model's quirks."""

    def __call__(self, question: str, *, multiple_choice: bool = False) -> str: ...


class Encoded(NamedTuple):
    """A prompt in tokens, and the characters each one stands for."""

    ids: list[int]
    offsets: list[Span]


def encode(tokenizer: Any, prompt: str, *, templated: bool = False) -> Encoded:
    """The prompt's tokens. A chat template writes its special tokens itself; other prompts get the tokenizer's."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which characters a token stands for: load the fast tokenizer "
            f"(use_fast=True), the one that comes as tokenizer.json"
        )
    # verbose: a prompt longer than the tokenizer's idea of the model is the caller's business, not a line on stderr.
    made = tokenizer(prompt, add_special_tokens=not templated, return_offsets_mapping=True, verbose=False)
    return Encoded(list(made["input_ids"]), [(int(start), int(end)) for start, end in made["offset_mapping"]])


def encode_example(tokenizer: Any, example: Example) -> Encoded:
    return encode(tokenizer, example.prompt, templated=example.templated)


class Asked(NamedTuple):
    """A question in tokens that continue the prompt's, and those of its answer."""

    ids: list[int]
    answer: list[int]


def encode_ask(tokenizer: Any, question: Question) -> Asked:
    """The question and its answer, tokenised together, as a model that read one would write the other.

    Where a token spans the border they are tokenised apart: the question cannot hold a part of its answer.
    """
    whole = encode(tokenizer, question.ask + question.continuation, templated=True)
    alone = encode(tokenizer, question.ask, templated=True).ids
    if whole.ids[: len(alone)] == alone and len(whole.ids) > len(alone):
        return Asked(alone, whole.ids[len(alone) :])
    answer = encode(tokenizer, question.continuation, templated=True).ids
    if not alone or not answer:
        raise ValueError(f"this tokenizer has no tokens for {(question.continuation if alone else question.ask)!r}")
    return Asked(alone, answer)


def tokens_of(span: Span, offsets: Sequence[Span]) -> range:
    """The positions of the tokens that stand for any character of the span."""
    start, end = span
    # Special tokens stand for (0, 0), in front of the text or behind it: only the others are in order.
    first, last = 0, len(offsets)
    while first < last and offsets[first][1] == 0:
        first += 1
    while last > first and offsets[last - 1][1] == 0:
        last -= 1
    begin = bisect_right(offsets, start, first, last, key=lambda o: o[1])
    stop = bisect_left(offsets, end, begin, last, key=lambda o: o[0])
    if begin >= stop:
        raise ValueError(f"no token stands for characters {start} to {end}: are these the offsets of this prompt?")
    return range(begin, stop)


def gold_blocks(example: Example, question: Question, offsets: Sequence[Span], block: int) -> list[list[int]]:
    """For each gold span of the question, the key blocks that hold a token of it."""
    if block < 1:
        raise ValueError(f"block must be a whole number of at least 1, got {block!r}")
    spans = (tokens_of(span, offsets) for span in question.gold)
    return [list(range(found.start // block, (found.stop - 1) // block + 1)) for found in spans]


def answer_tokens(example: Example, question: Question, offsets: Sequence[Span]) -> range:
    """The positions of a teacher-forced answer's tokens; the row before each is the one that predicts it."""
    if question.at is None:
        raise ValueError(f"the answer to {example.key} is generated, it is not in the prompt")
    found = tokens_of((question.at, question.at + len(question.answers[0])), offsets)
    if found.start == 0:
        raise ValueError(f"the answer of {example.key} is the prompt's first token, which no row predicts")
    return found
