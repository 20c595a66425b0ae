"""Scores by hand."""

from __future__ import annotations

from typing import Any

import pytest

from closecall_lab.tasks import choice_in, choice_tokens, choose
from closecall_lab.tasks.scoring import best_f1, f1, found, plain_words, same_words, share_found

LETTERS = ("A", "B", "C", "D")


@pytest.mark.parametrize(
    ("answer", "output", "there"),
    [
        ("1234567", " 1234567.", True),
        ("1234567", "12345678", False),
        ("1234567", "01234567", False),
        ("1234567", "1,234,567", False),
        ("QWERT", "the variables qwert and ASDFG", True),
        ("QWERT", "QWERTY", False),
        ("a+b", "is a+b?", True),
        ("kato", "", False),
    ],
)
def test_found(answer: str, output: str, there: bool) -> None:
    assert found(answer, output) is there


def test_share_found() -> None:
    assert share_found(("11", "22", "33", "44"), "22, 44 and 5511") == 0.5


def test_same_words() -> None:
    assert same_words("a -> b", " a  -> b\n") == 1
    assert same_words("a -> b", "a -> b .") == 0


def test_plain_words() -> None:
    assert plain_words("The cat's (an) A-frame, theory!") == ["cats", "aframe", "theory"]


@pytest.mark.parametrize(
    ("answer", "output", "score"),
    [
        ("the Eiffel Tower", "Eiffel tower.", 1.0),
        ("red green", "red blue", 0.5),
        ("red", "red blue green", 0.5),  # precision 1/3, recall 1
        ("red red", "red", 2 / 3),  # words count as often as they occur in both
        ("red", "blue", 0.0),
        ("red", "", 0.0),
        ("the", "the", 0.0),  # nothing is left of either
    ],
)
def test_f1(answer: str, output: str, score: float) -> None:
    assert f1(answer, output) == pytest.approx(score)


def test_the_best_answer_counts() -> None:
    assert best_f1(("blue", "red green"), "green red") == 1


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("The correct answer is (B)", "B"),
        ("The correct answer is B.", "B"),
        ("the answer is: C", "C"),
        ("**Answer: (D)**", "D"),
        ("Answer: B", "B"),
        ("The Answer is D, because", "D"),
        ("The correct answer is (B), not (C)", "B"),
        ("B", "B"),
        (" B) because", "B"),
        ("(C)", "C"),
        ("D.\nThe text says so", "D"),
        ("A\n\nSince", "A"),
        ("I choose (C) since it fits", "C"),
        ("It is either (A) or (C)", None),
        ("A dog is mentioned", None),
        ("Because of the war", None),
        ("E", None),
        ("", None),
        ("The answer is unclear", None),
        ("The answer isn't Dover", None),
    ],
)
def test_the_letter_of_an_output(output: str, letter: str | None) -> None:
    assert choice_in(output, LETTERS) == letter


def test_letters_by_their_logits(tokenizer: Any) -> None:
    tokens = choice_tokens(tokenizer, LETTERS)
    flat = [t for forms in tokens for t in forms]
    assert len(set(flat)) == len(flat)
    for letter, forms in zip(LETTERS, tokens, strict=True):
        assert {tokenizer.decode([t]).strip() for t in forms} == {letter}
        assert tokenizer(letter, add_special_tokens=False)["input_ids"][0] in forms
    logits = [0.0] * len(tokenizer)
    logits[tokens[2][-1]] = 1.0
    logits[tokens[1][0]] = 0.5
    assert choose(logits, LETTERS, tokens) == "C"


def test_a_tokenizer_without_letters(probe: Any) -> None:
    with pytest.raises(ValueError, match="no token for the letter 'A'"):
        choice_tokens(probe, LETTERS)


class Deaf:
    """A tokenizer that drops every word it does not know, and knows none."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": []}


def test_a_tokenizer_that_makes_no_tokens_of_a_letter() -> None:
    with pytest.raises(ValueError, match="no token for the letter 'A': score the generated answer instead"):
        choice_tokens(Deaf(), LETTERS)
