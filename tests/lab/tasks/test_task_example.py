"""The contract: examples that say what they should, their address, and tokens found by characters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closecall_lab.tasks import Example, Question, answer_tokens, encode, encode_example, gold_blocks, tokens_of
from closecall_lab.tasks.base import check_least
from closecall_lab.tasks.fit import most, tail

BASE = Example(
    task="t",
    key="t/8/seed0/0",
    context=8,
    prompt="one two three",
    questions=(Question(("two",), ((4, 7),)),),
    max_new_tokens=2,
    meta={"hops": 1},
)


def test_the_digest_covers_everything() -> None:
    other: dict[str, Any] = {
        "task": "u",
        "key": "k",
        "context": 9,
        "prompt": "one two threE",
        "questions": (Question(("two",), ((4, 8),)),),
        "max_new_tokens": 3,
        "choices": ("A",),
        "meta": {"hops": 2},
        "templated": True,
    }
    assert set(other) == {f.name for f in dataclasses.fields(Example)}
    digests = {BASE.digest(), *(dataclasses.replace(BASE, **{k: v}).digest() for k, v in other.items())}
    digests |= {dataclasses.replace(BASE, questions=(Question(("two",), ((4, 7),), at=4),)).digest()}
    assert len(digests) == len(other) + 2
    assert dataclasses.replace(BASE).digest() == BASE.digest()


def test_the_digest_does_not_depend_on_the_order_of_notes() -> None:
    a, b = dataclasses.replace(BASE, meta={"a": 1, "b": [2]}), dataclasses.replace(BASE, meta={"b": [2], "a": 1})
    assert a.digest() == b.digest()
    assert hash(a) == hash(b)


def test_an_example_goes_through_json() -> None:
    data = json.loads(json.dumps(dataclasses.asdict(BASE)))
    assert data["questions"] == [{"answers": ["two"], "gold": [[4, 7]], "at": None, "ask": ""}]


def test_addresses_of_examples_that_were_stored_before_shared_contexts_stay() -> None:
    data = dataclasses.asdict(BASE)
    for question in data["questions"]:
        del question["ask"]
    assert BASE.digest() == hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    shared = dataclasses.replace(BASE, questions=(Question(("two",), ask="Which?"),))
    assert shared.shared
    assert shared.digest() != dataclasses.replace(BASE, questions=(Question(("two",), ask="What?"),)).digest()


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ((), "asks nothing"),
        ((Question(()),), "without an answer"),
        ((Question(("",)),), "without an answer"),
        ((Question(("two",), ((4, 14),)),), r"gold span \(4, 14\), but its prompt has 13 characters"),
        ((Question(("two",), ((4, 4),)),), r"gold span \(4, 4\)"),
        ((Question(("two",), (), at=3),), "no answer 'two' at character 3"),
        ((Question(("two", "one"), ask="Which?"),), "a question with `ask` has one answer"),
        ((Question(("two",), ask="Which?"), Question(("two",))), "either all questions continue the prompt"),
    ],
)
def test_examples_that_make_no_sense(questions: tuple[Question, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, questions=questions)


@st.composite
def tokens_and_spans(draw: st.DrawFn) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Offsets as tokenizers give them: in order, with gaps, with characters shared by two tokens, specials around."""
    steps = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), min_size=1, max_size=30))
    offsets: list[tuple[int, int]] = []
    at = 0
    for gap, width, twice in steps:
        offsets += [(at + gap, at + gap + width)] * (1 + twice)
        at += gap + width
    front, back = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    start = draw(st.integers(0, at - 1))
    return [(0, 0)] * front + offsets + [(0, 0)] * back, (start, draw(st.integers(start + 1, at)))


@given(tokens_and_spans(), st.integers(1, 9))
def test_tokens_and_blocks_by_brute_force(case: tuple[list[tuple[int, int]], tuple[int, int]], block: int) -> None:
    offsets, (start, end) = case
    holders = [i for i, (a, b) in enumerate(offsets) if any(a <= c < b for c in range(start, end))]
    if not holders:
        with pytest.raises(ValueError, match="no token stands for"):
            tokens_of((start, end), offsets)
        return
    assert list(tokens_of((start, end), offsets)) == holders
    example = dataclasses.replace(BASE, prompt="x" * 300, questions=(Question(("x",), ((start, end),)),))
    (found,) = gold_blocks(example, example.questions[0], offsets, block)
    assert found == sorted({i // block for i in holders})


def test_blocks_of_several_spans_keep_their_order() -> None:
    offsets = [(i, i + 1) for i in range(13)]
    question = Question(("x",), ((10, 13), (0, 2), (3, 9)))
    example = dataclasses.replace(BASE, questions=(question,))
    assert gold_blocks(example, question, offsets, 4) == [[2, 3], [0], [0, 1, 2]]
    with pytest.raises(ValueError, match="block must be"):
        gold_blocks(example, question, offsets, 0)


def test_the_tokens_of_a_forced_answer(plain: Any) -> None:
    prompt = "The sea is grey. What is the sea? grey and calm"
    at = prompt.index("grey and")
    question = Question(("grey",), ((0, 16),), at=at)
    example = dataclasses.replace(BASE, prompt=prompt, questions=(question,))
    encoded = encode_example(plain, example)
    found = answer_tokens(example, question, encoded.offsets)
    assert plain.decode(encoded.ids[found.start : found.stop]).strip() == "grey"
    with pytest.raises(ValueError, match="is generated"):
        answer_tokens(BASE, BASE.questions[0], encoded.offsets)
    first = dataclasses.replace(BASE, questions=(Question(("one",), at=0),))
    with pytest.raises(ValueError, match="which no row predicts"):
        answer_tokens(first, first.questions[0], [(0, 3), (3, 7), (7, 13)])


def test_special_tokens_are_the_templates_business(plain: Any) -> None:
    bare, templated = encode(plain, "The sea"), encode(plain, "The sea", templated=True)
    assert bare.ids == [plain.bos_token_id, *templated.ids]
    assert bare.offsets == [(0, 0), *templated.offsets]


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="does not tell which characters"):
        encode(object(), "The sea")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(0, 20), st.data())
def test_the_most_that_fits_by_brute_force(steps: list[int], base: int, data: st.DataObject) -> None:
    sizes = [base + sum(steps[:n]) for n in range(len(steps) + 1)]

    def size(n: int) -> int:  # goes on growing past the list
        return sizes[n] if n < len(sizes) else sizes[-1] + 3 * (n - len(steps))

    target = data.draw(st.integers(base, sizes[-1] + 30))
    best = max(n for n in range(len(steps) + 40) if size(n) <= target)
    assert most(size, target, guess=data.draw(st.integers(0, 100))) == best


def test_the_most_that_fits_counts_seldom() -> None:
    asked: list[int] = []

    def size(n: int) -> int:
        asked.append(n)
        return 37 + 7 * n + n % 3

    assert most(size, 32768) == (32768 - 37) // 7
    assert len(asked) <= 6


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="nothing fits: 5 tokens at the least, 4 are allowed"):
        most(lambda n: n + 5, 4)


def test_the_tail_is_so_many_words() -> None:
    assert [tail(n) for n in range(4)] == ["", "and", "and on", "and on and"]


def test_check_least_names_the_option() -> None:
    from closecall_lab import tasks

    with pytest.raises(ValueError, match="keys of task 'niah-multikey' must be at least 9, got 3"):
        check_least(tasks.get("niah-multikey"), keys=9)
