from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closecall_lab.probes import text, words
from closecall_lab.probes.words import ARROW, ASK, END, IDS, KEYS, VALUES

Where = Literal["end", "scattered"]


def read(passage: str) -> dict[str, str]:
    """The entries of a text, found by their form alone."""
    found = re.findall(rf"(?:^|(?<=\. )|(?<= ))(\S+) {ARROW} (\S+) \{END}", re.sub(rf"\b{ASK} [^.]*\.", "", passage))
    assert len(dict(found)) == len(found), "a key stands in two entries"
    return dict(found)


def follow(entries: dict[str, str], key: str) -> list[str]:
    chain = [entries[key]]
    while chain[-1] in entries:
        chain.append(entries[chain[-1]])
    return chain


@given(
    seed=st.integers(0, 2**32),
    extra=st.integers(0, 3000),
    chains=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    where=st.sampled_from(["end", "row", "scattered"]),
    data=st.data(),
)
def test_passage_keeps_its_promises(
    seed: int, extra: int, chains: list[int], where: Where, data: st.DataObject
) -> None:
    asked = data.draw(st.integers(1, len(chains)))
    length = 1 + sum(map(text.chain_cost, chains)) + extra + (text.APART * (asked - 1) if where == "row" else 0)
    passage = text.passage(np.random.default_rng(seed), length, chains, n_questions=asked, where=where)
    entries = read(passage.text)
    assert len(entries) == sum(hops + 1 for hops in chains)
    assert len(passage.questions) == asked
    for hops, question in zip(chains, passage.questions, strict=False):
        targets = follow(entries, question.key)
        assert len(targets) == hops + 1
        assert text.words(question.answer) == f" {ARROW} ".join(targets)
        assert question.value == targets[-1] in VALUES
        # The spans are the entries needed, in the order of the chase.
        pairs = zip([question.key, *targets], targets, strict=False)
        assert [text.words(passage.ids[a:b]) for a, b in question.gold] == [f"{a} {ARROW} {b} {END}" for a, b in pairs]
        prompt = passage.prompt(question)
        assert text.words(prompt[-3:]) == f"{ASK} {question.key} {ARROW}"
        assert len(prompt) == question.position
        assert all(end <= question.position - text.QUESTION for _, end in question.gold)
        if where == "end":
            assert len(prompt) == length
        else:
            assert len(passage.ids) == length
            assert prompt.tolist() == passage.ids[: question.position].tolist()
            stretch = passage.ids[question.position : question.position + len(question.answer) + 1]
            assert stretch.tolist() == [*question.answer, IDS[END]]
            assert [text.words([passage.ids[i]]) for i in question.looked_up] == targets


@given(seed=st.integers(0, 2**32), length=st.integers(50, 400))
def test_borders_are_where_sentences_start(seed: int, length: int) -> None:
    passage = text.pointer_chase(np.random.default_rng(seed), length, 1, n_chains=2, n_questions=2, where="scattered")
    ends = np.flatnonzero(passage.ids == IDS[END])
    starts = [1, *(ends[:-1] + 1).tolist()] if ends[-1] == length - 1 else [1, *(ends + 1).tolist()]
    # A filler of one word, which serves to reach the exact length, is a sentence without a full stop.
    assert set(starts) <= set(passage.borders.tolist())
    assert len(passage.borders) <= len(starts) + 1


def test_the_tokenizer_reads_the_text_as_built() -> None:
    passage = text.needles(np.random.default_rng(0), 500, 10)
    tokenizer = words.tokenizer()
    encoded = tokenizer(passage.prompt_text(passage.questions[0]), return_offsets_mapping=True)
    assert encoded["input_ids"] == passage.prompt(passage.questions[0]).tolist()
    (start, end) = passage.questions[0].gold[0]
    first, last = encoded["offset_mapping"][start][0], encoded["offset_mapping"][end - 1][1]
    assert passage.text[first:last] == f"{passage.questions[0].key} {ARROW} {passage.questions[0].value} {END}"
    assert tokenizer("otter zyzzyva")["input_ids"] == [IDS[words.START], IDS["otter"], IDS[words.UNKNOWN]]


def test_same_seed_same_passage() -> None:
    one, two, other = (text.needles(np.random.default_rng(seed), 300) for seed in (1, 1, 2))
    assert one.ids.tolist() == two.ids.tolist() != other.ids.tolist()
    assert one.questions == two.questions


def test_entries_are_found_all_over_the_haystack() -> None:
    rng = np.random.default_rng(0)
    depths = [q.gold[0][0] / 2000 for _ in range(60) for q in text.needles(rng, 2000, n_questions=24).questions]
    counts, _ = np.histogram(depths, bins=10, range=(0, 1))
    # 1440 uniform depths: each tenth expects 144 with a standard deviation of 11.4; five of those either way.
    assert counts.min() > 144 - 57
    assert counts.max() < 144 + 57


def test_active_limits_keys_and_values() -> None:
    passage = text.needles(np.random.default_rng(0), 200, 8, n_questions=8, active=8)
    assert {q.key for q in passage.questions} == set(KEYS[:8])
    assert {q.value for q in passage.questions} == set(VALUES[:8])


def test_values_differ_while_there_are_enough() -> None:
    few = text.needles(np.random.default_rng(0), 5000, len(VALUES), n_questions=len(VALUES))
    assert len({q.value for q in few.questions}) == len(VALUES)
    many = text.needles(np.random.default_rng(0), 5000, len(KEYS), n_questions=len(KEYS))
    assert len({q.key for q in many.questions}) == len(KEYS)


def test_no_word_has_two_kinds() -> None:
    assert len(set(words.VOCABULARY)) == len(words.VOCABULARY)
    assert all(words.VOCABULARY[slice(*words.SPANS[kind])] == group for kind, group in words.FILLER.items())
    assert words.VOCABULARY[slice(*words.SPANS["key"])] == KEYS
    assert words.VOCABULARY[slice(*words.SPANS["value"])] == VALUES


@pytest.mark.parametrize(
    ("output", "right"),
    [("teal .", True), ("teal", True), ("lion -> teal . lion", True), ("lime . teal", False), ("teal -> lime .", False),
     (". teal", False), ("", False), ("teal -> .", False)],
)  # fmt: skip
def test_answered(output: str, right: bool) -> None:
    assert text.answered(text.Question("otter", "teal", 10, (), ()), output) is right


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 20}, "at least 28"),
        ({"length": 0}, "length 0 is too short for 6 entries and 1 questions: at least 28"),
        ({"chains": [0, -1]}, "got -1"),
        ({"n_questions": 0}, r"number of chains \(6\), got 0"),
        ({"n_questions": 7}, r"number of chains \(6\), got 7"),
        ({"where": "middle"}, "got 'middle'"),
        ({"active": 0}, "active must be at least 1, got 0"),
        ({"active": 5}, "6 entries need as many keys and there are 5"),
        ({"length": 10**4, "chains": [0] * (len(KEYS) + 1)}, "fewer chains"),
    ],
)
def test_bad_requests(arguments: dict[str, object], message: str) -> None:
    wanted: dict[str, object] = {"length": 100, "chains": [0] * 6, "n_questions": 1} | arguments
    with pytest.raises(ValueError, match=message):
        text.passage(np.random.default_rng(0), **wanted)  # type: ignore[arg-type]
