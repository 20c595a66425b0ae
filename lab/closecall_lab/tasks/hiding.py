"""Needles in a haystack: the plan that retrieval, variable tracking and the pointer chase have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from .example import JSON, Example, Question, Span, encode_ask
from .fit import Room, most, tail
from .haystacks import hay


@dataclass(frozen=True)
class Ask:
    """One question, the first words of its answer (put into the model's mouth), and the answers.

    `gold` are the places of the needed needles in the plan's `needles`, in order of need.
    """

    question: str
    lead: str
    answers: tuple[str, ...]
    gold: Sequence[int]

    def said(self, room: Room) -> str:
        return self.lead if room.templated else f"Answer: {self.lead}"


@dataclass(frozen=True)
class Hiding:
    """What one example hides and asks.

    `depths` are from 0, the haystack's first sentence, to 1. `decoy` makes one more needle that is of no use. With
    `shared`, the text is a context that every question continues; else its only question stands at its end.
    """

    task: str
    intro: str
    needles: Sequence[str]
    depths: Sequence[float]
    asks: Sequence[Ask]
    secrets: Sequence[str]  # what must not stand in the haystack by chance
    decoy: Callable[[], str]
    max_new_tokens: int
    shared: bool = False
    meta: Mapping[str, JSON] = field(default_factory=dict)


def hide(plan: Hiding, haystack: str, room: Room, context: int, key: str) -> Example:
    """The example: as many sentences as fit, the needles among them, and a few words to fill the last gap."""
    chance = random.Random(f"{key}/haystack")
    source = hay(haystack, chance.random(), plan.decoy, plan.secrets)

    needles = [source.dressed(needle) for needle in plan.needles]

    def text(n: int, words: int) -> tuple[str, list[Span]]:
        sentences = [*source.first(n), *([source.dressed(tail(words))] if words else [])]
        body, spans = placed(needles, plan.depths, sentences, source.joint)
        return f"{plan.intro}\n\n{body}\n\n", moved(spans, len(plan.intro) + 2)

    gold = [depth for ask in plan.asks for depth in (plan.depths[i] for i in ask.gold)]
    meta = {"depths": gold, **source.facts, **plan.meta}
    return fill(plan.task, text, plan.asks, room, context, key, plan.max_new_tokens, shared=plan.shared, meta=meta)


def fill(
    task: str,
    text: Callable[[int, int], tuple[str, list[Span]]],
    asks: Sequence[Ask],
    room: Room,
    context: int,
    key: str,
    max_new_tokens: int,
    *,
    shared: bool,
    meta: Mapping[str, JSON],
    fewer: str = "needles",
) -> Example:
    """The example that fills the context. `text(n, words)` is its text with n pieces and so many words to fill a gap,
    and the spans that the questions' gold counts in. `fewer` is what to ask for less of if the context is too small."""
    continued = [room.shared("x", ask.question, ask.said(room))[1] for ask in asks] if shared else []
    if shared:
        made = (Question(ask.answers, ask=words) for ask, words in zip(asks, continued, strict=True))
        max_new_tokens = max(sum(map(len, encode_ask(room.tokenizer, question))) for question in made)
    target = context - max_new_tokens

    def written(n: int, words: int = 0) -> tuple[str, list[Span]]:
        body, spans = text(n, words)
        ask = asks[0]
        if shared:
            prompt, _, begin = room.shared(body, ask.question, ask.said(room))
        else:
            prompt, begin = room.prompt(body + ask.question, ask.said(room))
        return prompt, moved(spans, begin)

    @cache
    def size(n: int, words: int = 0) -> int:
        return room.count(written(n, words)[0])

    least = size(0)
    if least > target:
        of_them = f", {max_new_tokens} of them for the longest question and its answer" if shared else ""
        raise ValueError(
            f"task {task!r} needs a context of at least {least + max_new_tokens} tokens{of_them}, got {context}: "
            f"give more, or ask for fewer {fewer}"
        )
    n = most(size, target)
    words = most(partial(size, n), target, guess=target - size(n))
    prompt, spans = written(n, words)
    questions = tuple(
        Question(ask.answers, tuple(spans[i] for i in ask.gold), ask=continued[i] if shared else "")
        for i, ask in enumerate(asks)
    )
    return Example(
        task=task,
        key=key,
        context=context,
        prompt=prompt,
        questions=questions,
        max_new_tokens=max_new_tokens,
        meta={"prompt_tokens": size(n, words), **meta},
        templated=room.templated,
    )


def placed(
    needed: Sequence[str], depths: Sequence[float], others: Sequence[str], joint: str, end: Sequence[str] = ()
) -> tuple[str, list[Span]]:
    """Joins the pieces, each needed one at its depth among the others, and tells where the needed ones stand."""
    pieces: list[str] = []
    spans: list[Span] = [(0, 0)] * len(needed)
    at = done = 0

    def put(piece: str) -> Span:
        nonlocal at
        pieces.append(piece)
        begin, at = at, at + len(piece) + len(joint)
        return begin, begin + len(piece)

    for i in sorted(range(len(needed)), key=lambda i: depths[i]):
        until = round(depths[i] * len(others))
        for piece in others[done:until]:
            put(piece)
        done = max(done, until)
        spans[i] = put(needed[i])
    for piece in (*others[done:], *end):
        put(piece)
    return joint.join(pieces), spans


def moved(spans: Sequence[Span], by: int) -> list[Span]:
    """The spans in a text that has so many characters in front."""
    return [(by + start, by + end) for start, end in spans]
