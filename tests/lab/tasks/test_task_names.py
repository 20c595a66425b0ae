"""Tasks by name: options, canonical text, and what bad names get."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from closecall.registry import Registry
from closecall_lab import tasks
from closecall_lab.tasks import base, haystacks
from closecall_lab.tasks.lexicon import ADJECTIVES, NOUNS, Drawer
from closecall_lab.tasks.prose import TEXT

CANONICAL = {
    "niah-single": "niah-single",
    "niah-single:haystack=noise": "niah-single",
    "niah-multikey:haystack=prose,keys=4": "niah-multikey:keys=4,haystack=prose",
    "niah-multikey:keys=3,chat=no": "niah-multikey:chat=no",
    "pointer-chase:aloud=yes,hops=2": "pointer-chase:hops=2,aloud=yes",
    "longbench-v2:data=some.json,length=medium": "longbench-v2:length=medium,data=some.json",
    "longbench-musique:hops=4": "longbench-musique:hops=4",
    "probe-scattered:questions=4": "probe-scattered:questions=4",
    "probe-scattered:keys=40,questions=9": "probe-scattered:questions=9,keys=40",
    "probe-needle:questions=8,keys=24": "probe-needle:questions=8",
    "probe-needle:questions=1": "probe-needle",
    "probe-chase:questions=2": "probe-chase:questions=2",
    "variable-tracking:": "variable-tracking",
}


@pytest.mark.parametrize("name", CANONICAL)
def test_a_name_is_read_and_written(name: str) -> None:
    task = tasks.get(name)
    assert str(task) == CANONICAL[name]
    assert tasks.get(str(task)) == task


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_has_defaults_and_says_what_it_is(name: str) -> None:
    task = tasks.get(name)
    assert str(task) == task.name == name
    assert task.chat is None


def test_options_as_keywords_are_the_same() -> None:
    assert tasks.get("niah-multikey", keys=4, haystack="prose") == tasks.get("niah-multikey:keys=4,haystack=prose")
    assert tasks.get("niah-multikey:keys=4", chat=False) == tasks.get("niah-multikey:keys=4,chat=no")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("niah-multkey", "unknown task 'niah-multkey': did you mean 'niah-multikey'"),
        ("niah-multikey:key=4", "unknown option of task 'niah-multikey' 'key': did you mean 'keys'"),
        ("niah-multikey:keys=four", "keys of task 'niah-multikey' must be a whole number, got 'four'"),
        ("niah-multikey:keys=1", "keys of task 'niah-multikey' must be at least 2, got 1"),
        ("niah-multikey:keys", "written NAME:option=value"),
        ("niah-multikey:keys=", "written NAME:option=value"),
        ("niah-multikey:keys=4,keys=5", "'keys' of task 'niah-multikey' is given twice"),
        ("niah-single:haystack=prosa", "unknown haystack 'prosa': did you mean 'prose'"),
        ("niah-single:haystack=prose:no/such.txt", "prose:no/such.txt cannot be read: No such file"),
        ("niah-single:chat=maybe", "chat of task 'niah-single' is yes or no, got 'maybe'"),
        ("niah-multivalue:values=1", "values of task 'niah-multivalue' must be at least 2"),
        ("niah-multiquery:queries=0", "queries of task 'niah-multiquery' must be at least 2"),
        ("variable-tracking:hops=0", "hops of task 'variable-tracking' must be at least 1"),
        ("variable-tracking:chains=0", "chains of task 'variable-tracking' must be at least 1"),
        ("pointer-chase:hops=0", "hops of task 'pointer-chase' must be at least 1"),
        ("pointer-chase:distractors=-1", "distractors of task 'pointer-chase' must be at least 0"),
        ("common-words:repeats=3", "repeats of task 'common-words' must be at least 4, got 3"),
        ("frequent-words:frequent=0", "frequent of task 'frequent-words' must be at least 1"),
        ("probe-needle:keys=0", "keys of task 'probe-needle' must be at least 1"),
        ("probe-scattered:questions=25", "25 questions need as many keys, and there are 24"),
        ("probe-needle:questions=25", "25 questions need as many keys, and there are 24"),
        ("probe-needle:questions=0", "questions of task 'probe-needle' must be at least 1, got 0"),
        ("probe-chase:questions=2,generate=yes", "2 questions stand in the prompt and cannot be generated"),
        ("probe-chase:generate=yes,scattered=yes", "drop one of the two"),
        ("probe-chase:questions=7,scattered=yes", "7 questions need as many chains, and there are 6"),
        ("longbench-v2:length=medum", "unknown length of task 'longbench-v2' 'medum': did you mean 'medium'"),
        ("longbench-v2:difficulty=heavy", "unknown difficulty"),
        ("lm-eval:hellaswag", "closecall_lab.eval.lm_eval"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tasks.get(name)


@pytest.mark.parametrize(("option", "value"), [("keys", 3.5), ("keys", True), ("haystack", 7), ("chat", 1)])
def test_options_of_the_wrong_type(option: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{option} of task 'niah-multikey' must be"):
        tasks.get("niah-multikey", **{option: value})


def test_an_option_twice_by_text_and_keyword() -> None:
    with pytest.raises(ValueError, match="given twice"):
        tasks.get("niah-multikey:keys=4", keys=4)


@pytest.mark.parametrize(("context", "n", "seed"), [(0, 1, 0), (1024, -1, 0), (1024, 1, -1), (1024.0, 1, 0)])
def test_bad_counts(context: Any, n: int, seed: int, plain: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        next(tasks.get("niah-single").examples(plain, context, n, seed))


def test_chat_needs_a_template(plain: Any) -> None:
    with pytest.raises(ValueError, match="chat=yes needs a chat template"):
        next(tasks.get("niah-single:chat=yes").examples(plain, 1024, 1, 0))


def test_a_probes_task_is_for_probes(plain: Any) -> None:
    with pytest.raises(ValueError, match="run it on a probe"):
        next(tasks.get("probe-needle").examples(plain, 1024, 1, 0))


def test_a_task_of_ones_own_as_the_docs_have_it(monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    docs = Path(__file__).parents[3] / "docs" / "tasks.md"
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", docs.read_text(), re.DOTALL) if "Echo" in block]
    monkeypatch.setattr(base, "TASKS", Registry("task"))
    exec(code, {})
    task = tasks.get("echo:digits=7")
    (example,) = task.examples(plain, 64, 1, 0)
    (question,) = example.questions
    assert [example.prompt[start:end] for start, end in question.gold] == list(question.answers)
    assert example.prompt.startswith(f"Remember {question.answers[0]}.")
    assert example.key == "echo:digits=7/64/seed0/0"
    assert task.score(example, question, question.answers[0]) == 1


def test_unreadable_prose(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        tasks.get("niah-single", haystack=f"prose:{path}")
    path.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        tasks.get("niah-single", haystack=f"prose:{path}")


def test_the_prose_is_varied_and_cannot_hold_an_answer() -> None:
    sentences = haystacks.split(TEXT)
    assert len(sentences) >= 150
    assert len(set(sentences)) == len(sentences)
    assert not any(c.isdigit() for c in TEXT)
    assert TEXT.isascii()
    assert all("\n" not in s for s in sentences)


def test_words_are_listed_once() -> None:
    assert len(set(ADJECTIVES)) == len(ADJECTIVES)
    assert len(set(NOUNS)) == len(NOUNS)
    assert not set(ADJECTIVES) & set(NOUNS)


def test_names_never_run_out_nor_repeat() -> None:
    drawer = Drawer(random.Random(0))
    pairs = len(ADJECTIVES) * len(NOUNS)
    drawn = [drawer.name() for _ in range(pairs)]
    assert len(set(drawn)) == pairs
    assert {name.count("-") for name in drawn} == {1, 2}
