"""Needles in a haystack: the plan that retrieval, variable tracking and the pointer chase have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from .example import JSON, Example, Question, Span
from .fit import Room, most, tail
from .haystacks import hay


@dataclass(frozen=True)
class Plan:
    """What one example hides and asks. `gold` are the places of the needed needles in `needles`, in order of need.

    `depths` are from 0, the haystack's first sentence, to 1. `decoy` makes one more needle that is of no use.
    """

    task: str
    intro: str
    needles: Sequence[str]
    depths: Sequence[float]
    gold: Sequence[int]
    question: str
    lead: str
    answers: tuple[str, ...]
    secrets: Sequence[str]  # what must not stand in the haystack by chance
    decoy: Callable[[], str]
    max_new_tokens: int
    meta: Mapping[str, JSON] = field(default_factory=dict)


def hide(plan: Plan, haystack: str, room: Room, context: int, key: str) -> Example:
    """The example: as many sentences as fit, the needles among them, and a few words to fill the last gap."""
    chance = random.Random(f"{key}/haystack")
    sentences = hay(haystack, chance.random(), plan.decoy, plan.secrets)
    target = context - plan.max_new_tokens

    def written(n: int, words: int = 0) -> tuple[str, list[Span]]:
        body, spans = _body(plan, [*sentences.first(n), *filter(None, [tail(words)])])
        text = f"{plan.intro}\n\n{body}\n\n{plan.question}"
        prompt, begin = room.prompt(text, plan.lead)
        begin += len(plan.intro) + 2
        return prompt, [(begin + start, begin + end) for start, end in spans]

    @cache
    def size(n: int, words: int = 0) -> int:
        return room.count(written(n, words)[0])

    least = size(0)
    if least > target:
        raise ValueError(
            f"task {plan.task!r} needs a context of at least {least + plan.max_new_tokens} tokens, got {context}: "
            f"give more, or fewer needles"
        )
    n = most(size, target)
    words = most(partial(size, n), target, guess=target - size(n))
    prompt, spans = written(n, words)
    question = Question(plan.answers, tuple(spans[i] for i in plan.gold))
    return Example(
        task=plan.task,
        key=key,
        context=context,
        prompt=prompt,
        questions=(question,),
        max_new_tokens=plan.max_new_tokens,
        meta={"prompt_tokens": size(n, words), "depths": [plan.depths[i] for i in plan.gold], **plan.meta},
        templated=room.templated,
    )


def _body(plan: Plan, sentences: Sequence[str]) -> tuple[str, list[Span]]:
    """The haystack's text, and where in it each needle of the plan is."""
    places = sorted(range(len(plan.needles)), key=lambda i: plan.depths[i])
    pieces: list[str] = []
    spans: list[Span] = [(0, 0)] * len(plan.needles)
    at = 0

    def put(piece: str) -> Span:
        nonlocal at
        pieces.append(piece)
        begin, at = at, at + len(piece) + 1
        return begin, begin + len(piece)

    done = 0
    for i in places:
        until = round(plan.depths[i] * len(sentences))
        for sentence in sentences[done:until]:
            put(sentence)
        done = max(done, until)
        spans[i] = put(plan.needles[i])
    for sentence in sentences[done:]:
        put(sentence)
    return " ".join(pieces), spans
