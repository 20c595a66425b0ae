"""LongBench from files of its shape, made here: reading, filters, truncation, scores, and what bad files get."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from closecall.models.cache import UnavailableError
from closecall_lab import tasks
from closecall_lab.tasks import choice_tokens, choose, encode_example
from closecall_lab.tasks.example import Example
from closecall_lab.tasks.longbench import CUT
from closecall_lab.tasks.prose import TEXT

datasets = pytest.importorskip("datasets")
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`datasets` keeps a copy of all it reads: here, not in the user's cache."""
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda **options: load(**options, cache_dir=str(tmp_path / "cache")))
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    yield
    if bars:
        datasets.enable_progress_bars()


def v2_rows() -> Rows:
    kinds = [("short", "easy"), ("short", "hard"), ("medium", "hard"), ("long", "easy"), ("medium", "easy")]
    return [
        {
            "_id": f"id{i}",
            "domain": "stories",
            "sub_domain": "towns",
            "difficulty": difficulty,
            "length": length,
            "question": f"Which town is number {i}?",
            "choice_A": "Merrow",
            "choice_B": "Dover",
            "choice_C": "Lisbon",
            "choice_D": "Turin",
            "answer": "ABCD"[i % 4],
            "context": f"Beginning {i}. {TEXT} End {i}.",
        }
        for i, (length, difficulty) in enumerate(kinds)
    ]


def v1_rows() -> Rows:
    return [
        {
            "_id": f"{i:04x}",
            "input": f"Who keeps lamp {i}?\n",
            "context": f"Beginning {i}. {TEXT} End {i}.",
            "answers": ["Tobias Wray", "Tobias"],
            "length": 2000,
            "dataset": "qasper",
            "language": "en",
            "all_classes": None,
        }
        for i in range(4)
    ]


def musique_rows() -> Rows:
    return [
        {
            "id": f"{hops}hop{'1' if hops > 2 else ''}__{number}_7",
            "question": "Who founded the place?",
            "answer": "Ada Pell",
            "answer_aliases": ["Pell"],
            "answerable": True,
            "paragraphs": [
                {
                    "idx": i,
                    "title": f"Title {i}",
                    "paragraph_text": f"Fact {i} of {number}. " + "The town is old and the sea is near. " * 20,
                    "is_supporting": i in (1, 9),
                }
                for i in range(10)
            ],
        }
        for number, hops in enumerate([2, 3, 4, 2])
    ]


def write_json(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(rows))


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    datasets.Dataset.from_list(rows).to_parquet(str(path))


WRITERS: dict[str, Callable[[Path, Rows], None]] = {"json": write_json, "jsonl": write_jsonl, "parquet": write_parquet}


def v2_file(tmp_path: Path, rows: Rows | None = None) -> Path:
    path = tmp_path / "v2.json"
    write_json(path, v2_rows() if rows is None else rows)
    return path


def every(task: Any, tokenizer: Any, context: int = 4096, n: int = 99, seed: int = 0) -> list[Example]:
    return list(task.examples(tokenizer, context, n, seed))


@pytest.mark.parametrize("suffix", WRITERS)
def test_v2_from_every_kind_of_file(suffix: str, tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / f"v2.{suffix}"
    WRITERS[suffix](path, v2_rows())
    found = every(tasks.get("longbench-v2", data=str(path)), tokenizer, context=16384)
    assert sorted(e.key for e in found) == [f"longbench-v2/16384/id{i}" for i in range(5)]
    for example in found:
        i = int(example.key[-1])
        assert example.questions[0].answers == ("ABCD"[i % 4],)
        assert example.choices == ("A", "B", "C", "D")
        assert example.meta["cut"] is False
        assert f"Beginning {i}. {TEXT} End {i}." in example.prompt
        assert f"Question: Which town is number {i}?\n(A) Merrow\n(B) Dover\n(C) Lisbon\n(D) Turin" in example.prompt
        assert example.meta["prompt_tokens"] == len(encode_example(tokenizer, example).ids)


def test_filters(tmp_path: Path, plain: Any) -> None:
    data = str(v2_file(tmp_path))
    wanted = {
        ("all", "all"): {0, 1, 2, 3, 4},
        ("short", "all"): {0, 1},
        ("medium", "all"): {2, 4},
        ("all", "hard"): {1, 2},
        ("medium", "easy"): {4},
    }
    for (length, difficulty), ids in wanted.items():
        task = tasks.get("longbench-v2", data=data, length=length, difficulty=difficulty)
        assert {int(e.key[-1]) for e in every(task, plain)} == ids
    with pytest.raises(ValueError, match="no rows of length long and difficulty hard"):
        every(tasks.get("longbench-v2", data=data, length="long", difficulty="hard"), plain)


def test_the_place_of_the_data_is_in_no_key(tmp_path: Path, plain: Any) -> None:
    task = tasks.get("longbench-v2", data=str(v2_file(tmp_path)), length="medium")
    (example,) = every(task, plain, n=1)
    assert example.key.startswith("longbench-v2:length=medium/4096/id")
    assert str(tmp_path) not in example.key
    assert str(task) == f"longbench-v2:length=medium,data={tmp_path}/v2.json"


def test_the_middle_goes(tmp_path: Path, tokenizer: Any) -> None:
    task = tasks.get("longbench-v2", data=str(v2_file(tmp_path)))
    for example in every(task, tokenizer, context=1024):
        i = example.key[-1]
        assert example.meta["cut"] is True
        tokens = len(encode_example(tokenizer, example).ids)
        assert example.meta["prompt_tokens"] == tokens
        assert 0 <= example.context - tokens - example.max_new_tokens <= 2
        start = example.prompt.index(f"Beginning {i}. The town of Merrow")
        end = example.prompt.index(f" End {i}.\n\nQuestion")
        document = example.prompt[start:end]
        head, back = document.split(CUT)
        whole = f"Beginning {i}. {TEXT} End {i}."
        assert whole.startswith(head)
        assert whole.endswith(back + f" End {i}.")
        sizes = [len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (head, back + f" End {i}.")]
        assert abs(sizes[0] - sizes[1]) <= 3
        assert example.prompt.count("The correct answer is (X)") == 1


def test_order_comes_from_the_seed(tmp_path: Path, plain: Any) -> None:
    task = tasks.get("longbench-v2", data=str(v2_file(tmp_path)))
    first = every(task, plain)
    assert every(task, plain) == first
    assert every(task, plain, n=2) == first[:2]
    orders = {tuple(e.key for e in every(task, plain, seed=s)) for s in range(6)}
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(e.key for e in first))}


def test_choices_by_letter_and_by_logits(tmp_path: Path, plain: Any) -> None:
    task = tasks.get("longbench-v2", data=str(v2_file(tmp_path)))
    example = next(e for e in every(task, plain) if e.questions[0].answers == ("C",))
    (question,) = example.questions
    assert task.score(example, question, "The correct answer is (C)") == 1
    assert task.score(example, question, "The correct answer is (B)") == 0
    assert task.score(example, question, "Lisbon, I think") == 0  # right, but in the wrong form
    tokens = choice_tokens(plain, example.choices)
    logits = [0.0] * len(plain)
    logits[tokens[2][0]] = 2.0
    assert task.score(example, question, choose(logits, example.choices, tokens)) == 1


def test_multiple_choice_is_told_to_the_wrap(tmp_path: Path, plain: Any) -> None:
    def wrap(question: str, *, multiple_choice: bool = False) -> str:
        return f"User: {question}\nModel:{' (' if multiple_choice else ''}"

    task = tasks.get("longbench-v2", data=str(v2_file(tmp_path)))
    (example,) = task.examples(plain, 1024, 1, 0, wrap=wrap)
    assert example.prompt.endswith("\nModel: (")
    tokens = len(encode_example(plain, example).ids)
    assert 0 <= 1024 - tokens - example.max_new_tokens <= 2


@pytest.mark.parametrize("subset", ["narrativeqa", "qasper", "musique"])
@pytest.mark.parametrize("suffix", [*WRITERS, "zip"])
def test_v1_from_every_kind_of_file(subset: str, suffix: str, tmp_path: Path, plain: Any) -> None:
    path = tmp_path / f"v1.{suffix}"
    if suffix == "zip":
        member = tmp_path / "one.jsonl"
        write_jsonl(member, v1_rows())
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(member, f"data/{subset}.jsonl")
            archive.writestr("data/other.jsonl", '{"a": 1}\n')
    else:
        WRITERS[suffix](path, v1_rows())
    task = tasks.get(f"longbench-{subset}", data=str(path))
    found = every(task, plain, context=2048)
    assert sorted(e.key for e in found) == [f"longbench-{subset}/2048/000{i}" for i in range(4)]
    for example in found:
        (question,) = example.questions
        assert question.answers == ("Tobias Wray", "Tobias")
        assert f"Question: Who keeps lamp {example.key[-1]}?\nAnswer:" in example.prompt
        assert 0 <= 2048 - int(str(example.meta["prompt_tokens"])) - example.max_new_tokens <= 2
        assert task.score(example, question, "the Tobias.") == 1
        assert task.score(example, question, "Tobias Wray the keeper") == pytest.approx(0.8)
        assert task.score(example, question, "Ada") == 0


def test_qasper_says_what_to_write_when_there_is_no_answer(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "v1.json"
    write_json(path, v1_rows())
    prompts = {
        s: every(tasks.get(f"longbench-{s}", data=str(path)), plain, n=1)[0].prompt for s in ("qasper", "musique")
    }
    assert '"unanswerable"' in prompts["qasper"]
    assert '"unanswerable"' not in prompts["musique"]


def test_musique_by_hops_with_its_paragraphs(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "musique.jsonl"
    write_jsonl(path, musique_rows())
    for hops, count in ((2, 2), (3, 1), (4, 1)):
        found = every(tasks.get("longbench-musique", data=str(path), hops=hops), tokenizer, context=8192)
        assert len(found) == count
        for example in found:
            assert example.meta["hops"] == hops
            assert f":hops={hops}/8192/{hops}hop" in example.key
            (question,) = example.questions
            assert question.answers == ("Ada Pell", "Pell")
            golds = [example.prompt[s:e] for s, e in question.gold]
            assert [g.split("\n")[0] for g in golds] == ["Passage 2: Title 1", "Passage 10: Title 9"]
            assert all(g.endswith("the sea is near.") for g in golds)
            assert example.meta["lost_gold"] == 0
    with pytest.raises(ValueError, match=r"no questions of 5 hops: there are \[2, 3, 4\]"):
        every(tasks.get("longbench-musique", data=str(path), hops=5), tokenizer)


def test_gold_that_truncation_took_is_counted(tmp_path: Path, plain: Any) -> None:
    rows = musique_rows()[:1]
    for paragraph in rows[0]["paragraphs"]:
        paragraph["is_supporting"] = paragraph["idx"] in (0, 5, 9)
    path = tmp_path / "musique.json"
    write_json(path, rows)
    (example,) = every(tasks.get("longbench-musique", data=str(path)), plain, context=1024)
    assert example.meta["cut"] is True
    assert example.meta["lost_gold"] == 1
    golds = [example.prompt[s:e] for s, e in example.questions[0].gold]
    assert [g.split("\n")[0] for g in golds] == ["Passage 1: Title 0", "Passage 10: Title 9"]
    assert all(g.endswith("the sea is near.") for g in golds)


def test_gold_at_the_cut_is_there_or_counted(tmp_path: Path, plain: Any) -> None:
    """Every paragraph is gold: each span that is left reads as its whole paragraph did."""
    rows = musique_rows()[:1]
    for paragraph in rows[0]["paragraphs"]:
        paragraph["is_supporting"] = True
    path = tmp_path / "musique.json"
    write_json(path, rows)
    for context in range(1060, 1082, 2):
        (example,) = every(tasks.get("longbench-musique", data=str(path)), plain, context=context)
        golds = [example.prompt[s:e] for s, e in example.questions[0].gold]
        assert all(g.startswith("Passage ") and g.endswith("the sea is near.") for g in golds), context
        assert example.meta["lost_gold"] == len(rows[0]["paragraphs"]) - len(golds)


def test_hops_need_to_be_told(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "v1.json"
    write_json(path, v1_rows())
    with pytest.raises(ValueError, match="does not tell how many hops"):
        every(tasks.get("longbench-musique", data=str(path), hops=2), plain)
    write_json(path, [row | {"hops": 2 + i % 2} for i, row in enumerate(v1_rows())])
    assert len(every(tasks.get("longbench-musique", data=str(path), hops=3), plain)) == 2


@pytest.mark.parametrize(
    ("name", "rows", "lost"),
    [
        ("longbench-v2", v2_rows, ("choice_C", "difficulty")),
        ("longbench-qasper", v1_rows, ("answers", "input")),
        ("longbench-musique", musique_rows, ("question",)),
    ],
)
def test_missing_columns_are_named(
    name: str, rows: Callable[[], Rows], lost: tuple[str, ...], tmp_path: Path, plain: Any
) -> None:
    path = tmp_path / "lossy.json"
    write_json(path, [{k: v for k, v in row.items() if k not in lost} for row in rows()])
    with pytest.raises(ValueError, match=rf"lacks the columns? .*{lost[0]}") as caught:
        every(tasks.get(name, data=str(path)), plain)
    assert all(column in str(caught.value).split("; it has")[0] for column in lost)


def test_files_that_are_not(tmp_path: Path, plain: Any) -> None:
    for data in (str(tmp_path / "none.json"), "none.jsonl", "one/two/three", "plain"):
        with pytest.raises(ValueError, match="no such data file"):
            every(tasks.get("longbench-v2", data=data), plain)
    other = tmp_path / "v2.csv"
    other.write_text("a,b\n")
    with pytest.raises(ValueError, match="none of the files that can be read"):
        every(tasks.get("longbench-v2", data=str(other)), plain)
    broken = tmp_path / "v2.json"
    broken.write_text("{ not json")
    with pytest.raises(ValueError, match=r"v2\.json cannot be read"):
        every(tasks.get("longbench-v2", data=str(broken)), plain)


def test_an_answer_that_is_no_letter(tmp_path: Path, plain: Any) -> None:
    rows = v2_rows()
    rows[3]["answer"] = "E"
    with pytest.raises(ValueError, match=r"row 3 of .*v2.json has the answer 'E'"):
        every(tasks.get("longbench-v2", data=str(v2_file(tmp_path, rows))), plain)


def test_a_question_that_does_not_fit(tmp_path: Path, plain: Any) -> None:
    with pytest.raises(ValueError, match=r"needs a context of at least \d+ tokens for its question alone, got 64"):
        every(tasks.get("longbench-v2", data=str(v2_file(tmp_path))), plain, context=64)


def test_what_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    asked = []

    def none(**options: Any) -> None:
        asked.append(options)
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", none)
    for name in ("longbench-v2", "longbench-qasper", "longbench-v2:data=zai-org/LongBench-v2"):
        with pytest.raises(UnavailableError, match=r"no route to the hub\. Check the name and the network"):
            every(tasks.get(name), plain)
    assert asked == [
        {"path": "THUDM/LongBench-v2"},
        {"path": "json", "data_files": "zip://data/qasper.jsonl::hf://datasets/THUDM/LongBench/data.zip"},
        {"path": "zai-org/LongBench-v2"},
    ]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install \./lab"):
        every(tasks.get("longbench-v2"), plain)
