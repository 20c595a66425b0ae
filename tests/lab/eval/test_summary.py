"""Tables of findings from stores made by hand, and the store as files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import closecall
from closecall_lab.eval import statistics, summary
from closecall_lab.eval.export import COLUMNS, export, flat
from closecall_lab.eval.matched import matched
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Cell, Run, Store

# Correct answers of two questions in each of four contexts.
ANSWERS = {
    ("dense", 0): [(1, 1), (1, 1), (1, 1), (1, 0)],
    ("quest", 8): [(1, 0), (0, 0), (1, 0), (0, 1)],
    ("router-on-quest", 8): [(1, 1), (1, 0), (1, 1), (0, 0)],
    ("router-on-quest/random", 8): [(1, 0), (1, 0), (1, 0), (0, 0)],
    ("router-on-quest/matched", 8): [(1, 1), (0, 0), (1, 1), (0, 0)],
}
SPENT = 20.5


def run_of(variant: tuple[str, int], number: int, correct: tuple[int, int], **changes: Any) -> Run:
    spec = Spec.parse(variant[0])
    policy = spec.policy(variant[1])
    if spec.control == "matched":
        policy = matched(policy, SPENT, 8192)
    budget = {"dense": 64.5, "quest": 15.0}.get(variant[0], SPENT)
    answers = [
        {
            "score": float(c),
            "correct": bool(c),
            "output": "blue",
            "asked_triggered": 0.5,
            "hit": 0.25,
            "hit_union": 0.75,
        }
        for c in correct
    ]
    layers = {"prefill_seconds": 0.5, "layer": [0], "trigger_rate": [0.4 if "router" in variant[0] else None]}
    plain: dict[str, Any] = {
        "model": "m", "example": f"e{number}", "policy": policy.to_json(), "score": sum(correct) / 2,
        "correct": sum(correct), "questions": 2, "effective_budget": budget, "kept_fraction": budget / 64.5,
        "prompt_tokens": 8192, "wall": 2.0, "answers": answers, "layers": layers, "warnings": [],
    }  # fmt: skip
    return Run(**(plain | changes))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "results.db")
    made.add_model("m", "tiny", {"context": 8192})
    for variant, listed in ANSWERS.items():
        for number, correct in enumerate(listed):
            made.add(Cell("m", "needle", 8192, 0, number, *variant), run_of(variant, number, correct))
    return made


def test_lines(store: Store) -> None:
    (group,) = summary.groups(store)
    lines = {(line.policy, line.budget): line for line in group.lines()}
    assert list(lines) == [
        ("dense", 0), ("quest", 8), ("router-on-quest", 8), ("router-on-quest/matched", 8),
        ("router-on-quest/random", 8),
    ]  # fmt: skip
    quest = lines["quest", 8]
    assert quest.accuracy == statistics.wilson([1, 0, 0, 0, 1, 0, 0, 1])
    assert quest.paired is not None
    assert (quest.paired.value, quest.paired.n) == (2 / 7, 7)  # the last one, dense answers wrong
    assert (quest.effective_budget, quest.tile_budget, quest.examples) == (15.0, 16, 4)
    assert (quest.trigger_rate, quest.hit, quest.hit_union) == (None, 0.25, 0.75)
    assert lines["router-on-quest", 8].trigger_rate == pytest.approx(0.4)
    assert quest.score == statistics.clustered([1, 0, 0, 0, 1, 0, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3])


def test_comparisons_and_the_split(store: Store) -> None:
    (group,) = summary.groups(store)
    by_pair = {(c.a, c.b): c for c in group.comparisons()}
    router = "router-on-quest@8"
    assert set(by_pair) == {
        (router, f"{rival}@8") for rival in ("quest", "router-on-quest/random", "router-on-quest/matched")
    }
    versus = by_pair[router, "quest@8"]
    assert (versus.wins, versus.losses) == (3, 1)
    assert versus.mcnemar == 0.625
    (split,) = group.splits()
    assert [split.parts.lift.value, split.parts.budget.value, split.parts.selectivity.value] == [0.25, 0.125, 0.125]
    assert split.sound
    assert split.worst_mismatch == 0


def test_a_control_that_missed_its_budget_is_named(store: Store) -> None:
    cell = Cell("m", "needle", 8192, 0, 3, "router-on-quest/matched", 8)
    off = run_of(("router-on-quest/matched", 8), 3, (0, 0), effective_budget=SPENT * 1.01)
    off = Run(**vars(off) | {"policy": matched(closecall.policy("router-on-quest", budget=8), 21.0, 8192).to_json()})
    store.add(cell, off)
    (group,) = summary.groups(store)
    (split,) = group.splits()
    assert not split.sound
    assert split.worst_mismatch == pytest.approx(0.01)
    page = "\n".join(table.text() for table in summary.tables(group, "tiny"))
    assert "router-on-quest@8: the control's budget is off by 1.00% on the worst example" in page


def test_only_examples_that_every_policy_has_run(store: Store) -> None:
    store.add(Cell("m", "needle", 8192, 0, 4, "dense", 0), run_of(("dense", 0), 4, (1, 1)))
    (group,) = summary.groups(store)
    assert group.left_out == 1
    assert {len(rows) for rows in group.rows.values()} == {4}
    page = summary.tables(group, "tiny")[0].text()
    assert "1 examples are left out, because some policy has not run them yet." in page
    assert [g.rows for g in summary.groups(store, variants={("dense", 0)}, n=2)] == [
        {("dense", 0): list(store.rows(policy="dense"))[:2]}
    ]


def test_runs_are_paired_by_what_the_example_was(store: Store) -> None:
    """Number 3 is another example for quest since the task changed; seed 1 happens to repeat an example of seed 0."""
    changed = Run(**vars(run_of(("quest", 8), 3, (0, 1))) | {"example": "reworded"})
    store.add(Cell("m", "needle", 8192, 0, 3, "quest", 8), changed)
    for variant in ANSWERS:
        store.link(Cell("m", "needle", 8192, 1, 0, *variant), run_of(variant, 2, (0, 0)).key)
    (group,) = summary.groups(store)
    assert {tuple(row.run.example for row in rows) for rows in group.rows.values()} == {("e0", "e1", "e2")}
    assert group.left_out == 2  # e3 of the others, and the reworded one


def test_a_budget_at_which_the_margin_decides_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "small.db") as small:
        variant = ("router", 2)
        small.add(Cell("m", "needle", 8192, 0, 0, *variant), run_of(variant, 0, (1, 0)))
        small.add(Cell("m", "needle", 8192, 0, 0, "router/random", 2), run_of(("router/random", 2), 0, (1, 0)))
        small.add(Cell("m", "needle", 8192, 0, 0, "topk", 2), run_of(("topk", 2), 0, (1, 0)))
        (group,) = summary.groups(small)
        assert [line.tile_budget for line in group.lines()] == [4, 4, 4]
        assert "router/random" in summary.tables(group, "tiny")[0].text()


LETTERED = (("The correct answer is (A)", True), ("no idea", False), ("(B)", False), ("hm", True))


@pytest.mark.parametrize("recorded", [True, False])
def test_letters_by_logits_and_answers_without_one(tmp_path: Path, recorded: bool) -> None:
    """Runs stored before it was recorded whether there was a letter are read from their output."""
    with Store(tmp_path / "letters.db") as store:
        for number, (said, right) in enumerate(LETTERED):
            answer = {"score": 0.0, "correct": False, "output": said, "choice": "A", "choice_correct": right}
            answer |= {"asked_triggered": 0.0} | ({"unformatted": said in ("no idea", "hm")} if recorded else {})
            run = run_of(("dense", 0), number, (0, 0), answers=[answer], questions=1)
            store.add(Cell("m", "longbench-v2", 8192, 0, number, "dense", 0), run)
        (group,) = summary.groups(store)
        (line,) = group.lines()
        assert line.by_logits == statistics.wilson([1, 0, 0, 1])
        assert line.no_letter == 0.5
        page = summary.tables(group, "tiny")[0].text()
        (row,) = (r for r in page.splitlines() if r.startswith("dense"))
        assert "0.50 [0.15, 0.85]" in row
        assert "50%" in row
        assert "no letter: generated answers that settle on none" in page
        (first, *_) = flat(store)
        assert first["unformatted"] is (False if recorded else None)


def test_the_page(store: Store) -> None:
    warning = "9000 tokens are more than the 8192 that tiny was trained for"
    run = run_of(("topk", 8), 3, (0, 1), warnings=[warning], effective_budget=15.0, kept_fraction=15 / 64.5)
    store.add(Cell("m", "needle", 8192, 0, 3, "quest", 8), run)
    (group,) = summary.groups(store)
    policies, between, lift = (table.text() for table in summary.tables(group, "tiny"))
    assert policies.startswith("needle at 8192 tokens on tiny: 4 examples, 8 questions")
    assert f"Warning: {warning}" in policies
    quest = next(line for line in policies.splitlines() if line.startswith("quest"))
    assert quest.split()[:5] == ["quest", "8", "16", "15.0", "23%"]
    assert "0.38 [0.14, 0.69]" in quest
    assert "McNemar" in between
    assert "0.25" in lift


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".json":
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return found
    if path.suffix == ".parquet":
        listed: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return listed
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", ["json", "parquet", "csv"])
def test_exports_hold_every_question(store: Store, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "deep" / f"results.{kind}"
    assert export(store, path) == 40
    rows, expected = read(path), list(flat(store))
    assert list(path.parent.iterdir()) == [path]
    assert [list(row) for row in rows] == [list(COLUMNS)] * 40
    if kind == "csv":
        expected = [{k: "" if v is None else str(v) for k, v in row.items()} for row in expected]
    assert rows == expected


def test_an_export_has_what_was_measured(store: Store) -> None:
    row = next(r for r in flat(store, policy="quest") if r["number"] == 2)
    assert (row["model_name"], row["task"], row["budget"], row["question"], row["correct"]) == (
        "tiny",
        "needle",
        8,
        0,
        True,
    )
    assert json.loads(row["layers"]) == {"layer": [0], "trigger_rate": [None]}
    assert closecall.Policy.from_json(row["policy_json"]) == closecall.policy("quest", budget=8)


def test_empty_stores_and_wrong_endings(tmp_path: Path, store: Store) -> None:
    with Store(tmp_path / "empty.db") as empty:
        assert summary.groups(empty) == []
        for kind in ("json", "parquet", "csv"):
            assert export(empty, tmp_path / f"empty.{kind}") == 0
            assert read(tmp_path / f"empty.{kind}") == []
    with pytest.raises(ValueError, match=r"unknown ending of an export '.parket': did you mean '.parquet'"):
        export(store, tmp_path / "results.parket")
