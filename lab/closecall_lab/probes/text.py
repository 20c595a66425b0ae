"""The probes' text: entries hidden in filler, and questions about them. Both training and evaluation are built on it.

    the old river walked slowly . otter -> lantern . a farmer sang . lantern -> teal . ask otter -> lantern -> teal .

An entry `key -> target .` files a target under a key. A target is a value, or another key: then it is a pointer, and
the chase goes on there. A question `ask key ->` is answered by following the pointers and writing down every target on
the way, so that each target takes one look-up in the haystack; the last one is the value. A needle is a chain without
pointers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from .words import ARROW, ASK, END, FILLER, IDS, KEYS, SPANS, START, VALUES, VOCABULARY

# Where questions stand: each on its own at the end of a prompt, all in a row at its end, or anywhere behind their
# entries. Those in a row begin APART tokens from each other, with filler between them: each has a tile of queries to
# itself, and does not have to share that tile's blocks with the others.
Where = Literal["end", "row", "scattered"]

APART = 64
ENTRY = 4  # tokens of an entry: key -> target .
QUESTION = 3  # tokens of a question without its answer: ask key ->

# Filler sentences by length: the parts of speech of their words. The first two only serve to reach an exact length.
PATTERNS: dict[int, tuple[str, ...]] = {
    1: ("adverb",),
    2: ("adverb", END),
    3: ("noun", "verb", END),
    4: ("article", "noun", "verb", END),
    5: ("article", "noun", "verb", "adverb", END),
    6: ("article", "adjective", "noun", "verb", "adverb", END),
    7: ("article", "noun", "verb", "preposition", "article", "noun", END),
    8: ("article", "adjective", "noun", "verb", "preposition", "article", "noun", END),
    9: ("article", "adjective", "noun", "verb", "preposition", "article", "adjective", "noun", END),
    10: ("article", "adjective", "noun", "verb", "adverb", "preposition", "article", "adjective", "noun", END),
}
USUAL = (5, 10)  # filler sentences have between so many and so many tokens
_MEAN = sum(USUAL) / 2


def _bounds(pattern: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    spans = [(IDS[END], IDS[END] + 1) if part == END else SPANS[part] for part in pattern]
    return tuple(first for first, _ in spans), tuple(end for _, end in spans)


_BOUNDS = {length: _bounds(pattern) for length, pattern in PATTERNS.items()}


class TooShortError(ValueError):
    """A passage cannot hold what it is to hold. With so many tokens more (`missing`) it could."""

    def __init__(self, message: str, missing: int = 0) -> None:  # unpickled, it is set afterwards
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True)
class Question:
    """One question, its answer, and where the answer stands.

    `position` is where the first token of the answer is (to be) in the passage. `answer` are its token ids: targets,
    with an arrow between any two; the value is the last of them. `gold` has one (start, end) span of tokens per entry
    needed, in the order in which they are needed.
    """

    key: str
    value: str
    position: int
    answer: tuple[int, ...]
    gold: tuple[tuple[int, int], ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The question itself: `ask key ->`."""
        return (IDS[ASK], IDS[self.key], IDS[ARROW])

    @property
    def looked_up(self) -> tuple[int, ...]:
        """Positions of the answer's tokens that take a look-up (the others are arrows)."""
        return tuple(range(self.position, self.position + len(self.answer), 2))


@dataclass(frozen=True)
class Passage:
    """A text of probes' words with questions about it.

    Scattered questions, and those in a row, stand in `ids`, answers included. Questions at the end do not: each is
    asked on its own after the same haystack, and `prompt` puts the two together.
    """

    ids: np.ndarray
    questions: tuple[Question, ...]
    borders: np.ndarray = field(repr=False)  # where each sentence starts

    @property
    def text(self) -> str:
        """The words without `<start>`: the tokenizer puts that in front by itself."""
        return words(self.ids[1:])

    def prompt(self, question: Question) -> np.ndarray:
        """Token ids up to and including the question: what to give to the model for it to answer."""
        return np.concatenate([self.ids[: question.position - QUESTION], np.array(question.ids, dtype=self.ids.dtype)])

    def prompt_text(self, question: Question) -> str:
        return words(self.prompt(question)[1:])


def words(ids: Sequence[int] | np.ndarray) -> str:
    """Token ids as text."""
    return " ".join(VOCABULARY[int(i)] for i in ids)


def answered(question: Question, output: str) -> bool:
    """Does the output arrive at the question's value? What it writes after its first full stop does not count."""
    given = output.split(END, 1)[0].split()
    return bool(given) and given[-1] == question.value


def needles(
    rng: np.random.Generator,
    length: int,
    n_keys: int = 24,
    *,
    n_questions: int = 1,
    where: Where = "end",
    active: int | None = None,
) -> Passage:
    """`n_keys` entries `key -> value .` in filler, and questions about some of them."""
    return passage(rng, length, [0] * n_keys, n_questions=n_questions, where=where, active=active)


def pointer_chase(
    rng: np.random.Generator,
    length: int,
    hops: int = 3,
    *,
    n_chains: int = 6,
    n_questions: int = 1,
    where: Where = "end",
    active: int | None = None,
) -> Passage:
    """`n_chains` chains of `hops` pointers and a value each, all entries shuffled into filler; most only distract."""
    return passage(rng, length, [hops] * n_chains, n_questions=n_questions, where=where, active=active)


def passage(
    rng: np.random.Generator,
    length: int,
    chains: Sequence[int],
    *,
    n_questions: int,
    where: Where = "end",
    active: int | None = None,
) -> Passage:
    """A passage with one chain of so many pointers per element of `chains`; the first `n_questions` chains are asked.

    `length` is exact: with questions at the end, of every prompt; with others, of the whole passage, answers included.
    `active` limits keys and values to the first so many of the vocabulary, for easy beginnings. The same `rng` state
    gives the same passage.
    """
    n_entries = _check(length, chains, n_questions, where, active)
    room = length - 1 - ENTRY * n_entries
    asking = [_question_tokens(hops) for hops in chains[:n_questions]]
    between = [max(0, APART - n) for n in asking[:-1]] if where == "row" else []
    room -= QUESTION if where == "end" else sum(asking) + sum(between)
    if room < 0:
        raise TooShortError(
            f"length {length} is too short for {n_entries} entries and {n_questions} questions: at least "
            f"{length - room} tokens are needed. Give more length or fewer keys",
            -room,
        )
    n_values = _pool(len(VALUES), active)
    keys = SPANS["key"][0] + rng.permutation(capacity(active))[:n_entries]
    # Two keys may share a value only where there are not enough values.
    values = SPANS["value"][0] + rng.permutation(max(n_values, len(chains)))[: len(chains)] % n_values

    sentences = _filler(rng, room)
    when = rng.random(len(sentences)).tolist()
    chain_sentences: list[list[int]] = []
    chain_tokens: list[list[int]] = []
    taken = 0
    for hops, value in zip(chains, values.tolist(), strict=True):
        visited = [*keys[taken : taken + hops + 1].tolist(), value]
        taken += hops + 1
        chain_tokens.append(visited)
        chain_sentences.append(list(range(len(sentences), len(sentences) + hops + 1)))
        sentences += [[a, IDS[ARROW], b, IDS[END]] for a, b in itertools.pairwise(visited)]
        when += rng.random(hops + 1).tolist()
    asked_in: list[int] = []
    if where != "end":
        for visited, entries in zip(chain_tokens[:n_questions], chain_sentences, strict=False):
            asked_in.append(len(sentences))
            sentences.append([IDS[ASK], *_arrows(visited), IDS[END]])
            last = max(when[i] for i in entries)
            when.append(last + (1 - last) * rng.random() if where == "scattered" else 1.0)  # all else comes before 1
            if len(asked_in) <= len(between):
                gap = _filler(rng, between[len(asked_in) - 1])
                sentences += gap
                when += [1.0] * len(gap)  # sorted as they are appended

    order = np.argsort(np.array(when), kind="stable")
    sizes = np.array([len(s) for s in sentences])
    starts = np.empty(len(sentences), dtype=np.int64)
    starts[order] = 1 + np.concatenate([[0], np.cumsum(sizes[order])[:-1]])
    ids = np.array([IDS[START], *(token for i in order.tolist() for token in sentences[i])], dtype=np.int64)

    questions = []
    for number, (visited, entries) in enumerate(zip(chain_tokens[:n_questions], chain_sentences, strict=False)):
        begin = len(ids) if where == "end" else int(starts[asked_in[number]])
        spans = tuple((int(starts[i]), int(starts[i]) + ENTRY) for i in entries)
        key, value = VOCABULARY[visited[0]], VOCABULARY[visited[-1]]
        questions.append(Question(key, value, begin + QUESTION, tuple(_arrows(visited[1:])), spans))
    return Passage(ids, tuple(questions), starts[order])


def _check(length: int, chains: Sequence[int], n_questions: int, where: str, active: int | None) -> int:
    """Refuses what cannot be built, and says how many entries there are to be."""
    if where not in get_args(Where):
        raise ValueError(f"where must be 'end', 'row' or 'scattered', got {where!r}")
    if any(hops < 0 for hops in chains):
        raise ValueError(f"a chain has 0 pointers or more, got {min(chains)}")
    if not 1 <= n_questions <= len(chains):
        raise ValueError(f"n_questions must be between 1 and the number of chains ({len(chains)}), got {n_questions}")
    if active is not None and active < 1:
        raise ValueError(f"active must be at least 1, got {active}")
    n_entries = sum(hops + 1 for hops in chains)
    if n_entries > capacity(active):
        raise ValueError(
            f"{n_entries} entries need as many keys and there are {capacity(active)}: ask for fewer chains or hops"
        )
    return n_entries


def _pool(size: int, active: int | None) -> int:
    return size if active is None else min(active, size)


def capacity(active: int | None = None) -> int:
    """How many entries a passage can have."""
    return _pool(len(KEYS), active)


def chain_cost(hops: int) -> int:
    """Tokens that a chain and an answered question about it take."""
    return ENTRY * (hops + 1) + _question_tokens(hops)


def _question_tokens(hops: int) -> int:
    return QUESTION + 2 * hops + 2  # the answer, and a full stop


def _arrows(tokens: Sequence[int]) -> list[int]:
    """The tokens with an arrow between any two."""
    out = [IDS[ARROW]] * (2 * len(tokens) - 1)
    out[::2] = tokens
    return out


def _filler(rng: np.random.Generator, room: int) -> list[list[int]]:
    """Filler sentences of exactly `room` tokens together."""
    lengths = []
    shortest, longest = USUAL
    drawn = rng.integers(shortest, longest + 1, size=int(room / _MEAN * 1.2) + 8).tolist()
    left = room
    for number in drawn:
        if left < shortest + longest:
            break
        lengths.append(number)
        left -= number
    while left > longest:  # two sentences are left, or the draw above ran out
        number = min(longest, left - shortest)
        lengths.append(number)
        left -= number
    if left:
        lengths.append(left)
    if not lengths:
        return []
    low = np.array([b for n in lengths for b in _BOUNDS[n][0]])
    high = np.array([b for n in lengths for b in _BOUNDS[n][1]])
    tokens = rng.integers(low, high).tolist()
    ends = np.cumsum(lengths).tolist()
    return [tokens[end - n : end] for end, n in zip(ends, lengths, strict=True)]


assert set(PATTERNS[10]) - {END} == set(FILLER)
