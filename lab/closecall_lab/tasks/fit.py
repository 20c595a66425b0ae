"""Prompts of an exact length in the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .example import Span, Wrap, encode

FIRST_STEP = 16
# What fills the last gap, smaller than a sentence: words that are one token to about every tokenizer.
TAIL = ("and", "on")


def most(size: Callable[[int], int], target: int, *, guess: int = FIRST_STEP) -> int:
    """The n with size(n) <= target < size(n + 1), for a size that grows with n; 0 must fit.

    Counting tokens is the work here, so every step goes where the line through the last two counts says, and the first
    one to `guess`.
    """
    low, low_size = 0, size(0)
    if low_size > target:
        raise ValueError(f"nothing fits: {low_size} tokens at the least, {target} are allowed")
    high = 0  # the least that is known not to fit; 0: none is known
    step = max(1, guess)
    while low_size < target and high != low + 1:
        tried = min(low + step, high - 1) if high else low + step
        now = size(tried)
        slope = (now - low_size) / (tried - low)
        if now <= target:
            low, low_size = tried, now
        else:
            high = tried
        step = max(1, int((target - low_size) / slope)) if slope > 0 else 2 * step
    return low


class Room:
    """A tokenizer and a way to ask, together: makes prompts and counts their tokens."""

    def __init__(
        self, tokenizer: Any, *, wrap: Wrap | None = None, chat: bool | None = None, multiple_choice: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.multiple_choice = multiple_choice
        template = getattr(tokenizer, "chat_template", None)
        if chat and wrap is None and template is None:
            raise ValueError(
                "chat=yes needs a chat template, and this tokenizer has none: leave chat out, or say chat=no"
            )
        if wrap is not None and wrap("x", multiple_choice=False) == f"{getattr(tokenizer, 'bos_token', None) or ''}x":
            wrap = None  # only the begin token in front, which the tokenizer puts there by itself
        self._wrap = None if chat is False else wrap or (self._template if template is not None else None)
        self.templated = self.wrapped("x") != "x"

    def _template(self, question: str, *, multiple_choice: bool = False) -> str:
        turns = [{"role": "user", "content": question}]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def wrapped(self, question: str) -> str:
        return self._wrap(question, multiple_choice=self.multiple_choice) if self._wrap else question

    def prompt(self, question: str, lead: str = "") -> tuple[str, int]:
        """The prompt, and where in it the question begins. `lead` are the answer's first words, put into the model's
        mouth."""
        whole = self.wrapped(question)
        begin = whole.find(question)
        if begin < 0:
            raise ValueError(
                "the chat template does not repeat a question as it is, so nothing in it can be found again"
            )
        gap = "\n" if lead and not self.templated else ""
        return whole + gap + lead, begin

    def shared(self, context: str, question: str, lead: str) -> tuple[str, str, int]:
        """The prompt that a context makes, what a question about it adds, and where in the prompt the context begins.

        The prompt is the same for every question, so that one prefill serves them all.
        """
        whole, begin = self.prompt(context + question, lead)
        end = begin + len(context)
        return whole[:end], whole[end:], begin

    def count(self, prompt: str) -> int:
        options = {"add_special_tokens": not self.templated, "verbose": False}
        return len(self.tokenizer(prompt, **options)["input_ids"])

    def offsets(self, text: str) -> Sequence[Span]:
        """The characters of each token of a bare piece of text."""
        return encode(self.tokenizer, text, templated=True).offsets


def tail(words: int) -> str:
    return " ".join(TAIL[i % len(TAIL)] for i in range(words))
