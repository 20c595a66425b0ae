"""How right an output is: found words, F1 of words, the letter of a multiple choice."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def found(answer: str, output: str) -> bool:
    """Is the answer there as words of its own? 123 is not in 1234; case does not matter."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", output, re.IGNORECASE) is not None


def share_found(answers: Sequence[str], output: str) -> float:
    """The share of the answers that are there: RULER's measure for all its retrieval tasks."""
    return sum(found(answer, output) for answer in answers) / len(answers)


def same_words(answer: str, output: str) -> float:
    """1 if the output is the answer and nothing else, blanks aside."""
    return float(output.split() == answer.split())


def plain_words(text: str) -> list[str]:
    """Lower case, without punctuation and articles: the words that F1 compares."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def f1(answer: str, output: str) -> float:
    """The harmonic mean of precision and recall over words, each counted as often as it occurs in both."""
    answer_words, output_words = plain_words(answer), plain_words(output)
    shared = sum((Counter(answer_words) & Counter(output_words)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(output_words), shared / len(answer_words)
    return 2 * precision * recall / (precision + recall)


def best_f1(answers: Sequence[str], output: str) -> float:
    """LongBench's measure for question answering: the best F1 over the gold answers."""
    return max(f1(answer, output) for answer in answers)


def choice_in(output: str, choices: Sequence[str]) -> str | None:
    """The letter that the output settles on; None if it does not keep to the format.

    In this order: a letter after "answer is", a letter that the output opens with, the only letter in brackets.
    """
    letters = "|".join(map(re.escape, choices))
    said = re.findall(rf"[Aa]nswer(?: is)?:?\s*\**\(?({letters})\b(?!')", output)
    if said:
        return str(said[0])
    opening = re.match(rf"[\s*]*\(?({letters})(?=[).:,*]|\s*$|\s*\n)", output)
    if opening:
        return opening.group(1)
    bracketed = set(re.findall(rf"\(({letters})\)", output))
    return bracketed.pop() if len(bracketed) == 1 else None


def choice_tokens(tokenizer: Any, choices: Sequence[str]) -> list[list[int]]:
    """For each choice, the tokens that can stand for it at the head of an answer: bare, after a blank, in brackets."""
    forms = []
    for letter in choices:
        read = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (letter, f" {letter}", f"({letter}"))
        last = (tokens[-1] for tokens in read if tokens)  # a tokenizer may drop what it does not know
        alone = {token for token in last if tokenizer.decode([token]).strip() == letter}
        if not alone:
            raise ValueError(
                f"this tokenizer has no token for the letter {letter!r}: score the generated answer instead"
            )
        forms.append(sorted(alone))
    return forms


def choose(logits: Any, choices: Sequence[str], tokens: Sequence[Sequence[int]]) -> str:
    """The choice whose likeliest form has the largest of the next token's logits."""
    best = [max(float(logits[token]) for token in forms) for forms in tokens]
    return choices[best.index(max(best))]
