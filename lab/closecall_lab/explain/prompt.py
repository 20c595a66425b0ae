"""The prompt as the page shows it: its text, where every token begins in it, who asks, and where the answer stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..tasks.example import Encoded, Span, encode, tokens_of

LONGEST = 8  # tokens that one character can take; a replacement character after as many is the text's own


@dataclass(frozen=True)
class Prompt:
    """One prompt in tokens and in characters.

    starts: of each token, the character its text begins at; one more for the end. They never fall.
    question, answers: characters of the question (None: nobody said) and of every place that holds the answer.
    expected: the answer that should come out; empty where nobody said.
    remarks: what the reader should know about these.
    """

    text: str
    ids: tuple[int, ...]
    starts: tuple[int, ...]
    offsets: tuple[Span, ...] = field(repr=False)
    question: Span | None = None
    answers: tuple[Span, ...] = ()
    expected: str = ""
    remarks: tuple[str, ...] = ()

    def cut(self, size: int) -> list[int]:
        """The characters at which every run of `size` tokens begins, and the end."""
        return [self.starts[i] for i in range(0, len(self.ids), size)] + [len(self.text)]

    def blocks_of(self, span: Span, block: int) -> list[int]:
        """The blocks that hold a token of these characters."""
        held = tokens_of(span, self.offsets)
        return list(range(held.start // block, (held.stop - 1) // block + 1))

    def answer_blocks(self, block: int) -> list[int]:
        return sorted({b for span in self.answers for b in self.blocks_of(span, block)})

    def asking_tiles(self, tile: int) -> list[int]:
        """The tiles that hold the question, and the last one, from which the answer is written."""
        last = (len(self.ids) - 1) // tile
        return sorted({last, *(self.blocks_of(self.question, tile) if self.question else ())})


def _starts(offsets: Sequence[Span], length: int) -> tuple[int, ...]:
    """Token starts that never fall: special tokens stand for (0, 0), in front of the text or behind it."""
    reached, starts = 0, []
    last = max((i for i, (_, end) in enumerate(offsets) if end), default=-1)
    for i, (start, _) in enumerate(offsets):
        reached = length if i > last else max(reached, start)
        starts.append(reached)
    return (*starts, length)


def from_text(
    tokenizer: Any, text: str, *, templated: bool = False, question: str = "", answer: str = "",
    gold: Sequence[Span] = (),
) -> Prompt:  # fmt: skip
    """The prompt of a text. `gold` are the characters that hold the answer, where somebody knows; else it is looked
    for, everywhere but in the question."""
    if not text.strip():
        raise ValueError("the prompt is empty: there is nothing to explain")
    encoded = encode(tokenizer, text, templated=templated)
    asked = _find_question(text, question)
    answers = tuple(gold) or _find_answers(text, answer, asked)
    return _made(text, encoded, asked, answers, answer)


def _find_question(text: str, question: str) -> Span | None:
    question = question.strip()
    if not question:
        return None
    at = text.rfind(question)
    if at < 0:
        raise ValueError(f"the question {_short(question)!r} is not in the prompt: give it as it stands there")
    return at, at + len(question)


def _find_answers(text: str, answer: str, question: Span | None) -> tuple[Span, ...]:
    answer = answer.strip()
    spans: list[Span] = []
    at = text.find(answer) if answer else -1
    while at >= 0:
        end = at + len(answer)
        if question is None or end <= question[0] or at >= question[1]:
            spans.append((at, end))
        at = text.find(answer, end)
    return tuple(spans)


def _made(text: str, encoded: Encoded, question: Span | None, answers: tuple[Span, ...], expected: str) -> Prompt:
    remarks = []
    if expected.strip() and not answers:
        remarks.append(f"The expected answer {_short(expected)!r} does not occur in the prompt: no block holds it.")
    starts = _starts(encoded.offsets, len(text))
    return Prompt(
        text, tuple(encoded.ids), starts, tuple(encoded.offsets), question, answers, expected.strip(), tuple(remarks)
    )


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def from_inputs(tokenizer: Any | None, inputs: Any, *, question: str = "", answer: str = "") -> Prompt:
    """The prompt of what a model is called with: a text, token ids, or the mapping that a tokenizer returns."""
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError("a text needs a tokenizer: pass tokenizer=, or the model as closecall.load returns it")
        return from_text(tokenizer, inputs, question=question, answer=answer)
    ids = _token_ids(inputs)
    pieces = [str(i) + " " for i in ids] if tokenizer is None else _pieces(tokenizer, ids)
    text, offsets = "", []
    for piece in pieces:
        offsets.append((len(text), len(text) + len(piece)))
        text += piece
    asked = _find_question(text, question)
    return _made(text, Encoded(ids, offsets), asked, _find_answers(text, answer, asked), answer)


def _token_ids(inputs: Any) -> list[int]:
    given = inputs["input_ids"] if isinstance(inputs, Mapping) or hasattr(inputs, "keys") else inputs
    ids = torch.as_tensor(given)
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise ValueError(f"explain shows one prompt, and these inputs are {ids.shape[0]}: pass them one by one")
    if ids.ndim not in (1, 2) or ids.dtype.is_floating_point:
        raise ValueError(f"inputs must be a text, token ids or a tokenizer's output, got {ids.dtype} {list(ids.shape)}")
    if not ids.numel():
        raise ValueError("the prompt is empty: there is nothing to explain")
    return [int(i) for i in ids.flatten()]


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the one before. A character of several tokens comes with the last of them."""

    def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    pieces: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for i, token in enumerate(ids):
        pending.append(token)
        piece = text_of(before + pending)[len(text_of(before)) :]
        unfinished = piece.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < LONGEST and i + 1 < len(ids)
        pieces.append("" if unfinished else piece)
        if not unfinished:
            before, pending = [token], []
    return pieces
