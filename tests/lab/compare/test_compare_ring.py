"""Who may be compared with whom, what the counts are, and which examples belong to which part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from closecall.policy import policy
from closecall_lab.eval import statistics
from closecall_lab.eval.compare import cost, figure, report, ring
from closecall_lab.eval.compare.quality import Quality, belongs, numbers
from closecall_lab.eval.compare.quality import Row as Judged
from closecall_lab.eval.compare.ring import Captured, RingGrid, duels, entrants, pairs
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Cell, Row, Run, Store
from closecall_lab.eval.summary import Group


def row(name: str, budget: int, number: int, correct: list[int], kept: float) -> Row:
    run = Run(
        model="m", example=f"example {number}", policy=policy("quest", budget=4).to_json(), score=0.0,
        correct=sum(correct), questions=len(correct), effective_budget=kept, kept_fraction=0.1, prompt_tokens=99,
        wall=1.0, answers=[{"score": float(c), "correct": bool(c), "asked_triggered": 0.0} for c in correct],
        layers={"trigger_rate": [None]}, warnings=[],
    )  # fmt: skip
    return Row(Cell("m", "task", 512, 0, number, name, budget), run, f"{name} {number}")


def group(kept: dict[str, list[float]], correct: dict[str, list[list[int]]], budget: int = 4) -> Group:
    rows = {
        (name, budget): [row(name, budget, i, c, kept[name][i]) for i, c in enumerate(correct[name])] for name in kept
    }
    return Group("m", "task", 512, rows, 0)


ANSWERS = {"quest": [[0, 0]] * 8 + [[1, 0]], "topk": [[1, 1]] * 8 + [[0, 1]], "router": [[1, 0]] * 9}
EVEN = {"quest": [10.0] * 9, "topk": [10.0] * 8 + [10.04], "router": [10.0] * 8 + [10.06]}


def test_only_equal_budgets_are_compared() -> None:
    found = duels([group(EVEN, ANSWERS)], ["quest"])
    assert [(d.policy, d.against, d.budget) for d in found] == [("topk", "quest", 4), ("router", "quest", 4)]
    topk, router = found
    assert topk.spent.most == pytest.approx(1.004)
    assert topk.spent.equal
    assert topk.comparison is not None
    assert (topk.comparison.wins, topk.comparison.losses) == (17, 1)
    # One fair pair is a family of one. Contexts stand together: 9 flips, not 18 answers.
    scores = {name: [float(x) for example in ANSWERS[name] for x in example] for name in ANSWERS}
    clusters = [i for i in range(9) for _ in range(2)]
    p = statistics.cluster_test(scores["topk"], scores["quest"], clusters)
    assert topk.comparison.cluster == topk.comparison.cluster_holm == p < 0.05
    assert topk.verdict == "better"
    assert router.spent.most == pytest.approx(1.006)
    assert router.comparison is None
    assert router.verdict == "keeps up to 0.6% more"


def test_who_keeps_less_may_win() -> None:
    """Or lose, or tie: what it kept is said with the verdict."""
    kept = EVEN | {"topk": [5.0] * 9}
    topk, _ = duels([group(kept, ANSWERS)], ["quest"])
    assert topk.verdict == "better, with 50% of the blocks"
    assert topk.comparison == duels([group(EVEN, ANSWERS)], ["quest"])[0].comparison
    back = next(d for d in duels([group(kept, ANSWERS)], ["topk"]) if d.policy == "quest")
    assert (back.comparison, back.verdict) == (None, "keeps up to 100.0% more")
    mixed = EVEN | {"topk": [5.0] * 8 + [10.06]}  # less on the whole, and more somewhere
    assert duels([group(mixed, ANSWERS)], ["quest"])[0].comparison is None


def test_worse_and_undecided() -> None:
    backwards = duels([group(EVEN, ANSWERS)], ["topk"])
    assert [d.verdict for d in backwards if d.policy == "quest"] == ["worse"]
    same = {"quest": ANSWERS["quest"], "topk": [*ANSWERS["quest"][:-1], [1, 1]]}
    (duel,) = duels([group(dict.fromkeys(same, EVEN["quest"]), same)], ["quest"])
    assert duel.verdict == "no difference shown"


def test_all_tasks_together() -> None:
    """Counts add up; a pair that is unfair in one of the groups is unfair."""
    one = group(dict.fromkeys(EVEN, EVEN["quest"]), ANSWERS)
    other = group(EVEN, ANSWERS)
    both = {d.policy: d for d in duels([one, other], ["quest"])}
    assert both["topk"].comparison is not None
    assert (both["topk"].comparison.wins, both["topk"].comparison.losses) == (34, 2)
    assert both["topk"].comparison.difference.n == 36
    assert both["router"].comparison is None


def test_pairs() -> None:
    variants = [
        ("dense", 0),
        ("quest", 4),
        ("topk", 4),
        ("router", 4),
        ("router/matched", 4),
        ("quest", 8),
        ("topk", 8),
    ]
    assert pairs(variants, ["quest", "topk"]) == [
        ("quest", "topk", 4), ("topk", "quest", 4), ("router", "quest", 4), ("router", "topk", 4),
        ("router/matched", "quest", 4), ("router/matched", "topk", 4), ("quest", "topk", 8), ("topk", "quest", 8),
        ("router", "router/matched", 4),
    ]  # fmt: skip


def test_routers_bring_their_matched_controls() -> None:
    specs = [Spec.parse(x) for x in ("quest", "router:q=0.3", "router/last")]
    assert [str(s) for s in entrants(specs, [Spec.parse("quest")])] == [
        "quest", "router:q=0.3", "router/last", "router/matched:q=0.3",
    ]  # fmt: skip


def test_the_two_parts_share_no_example() -> None:
    assert (numbers("choose", 3), numbers("final", 3)) == ([0, 2, 4], [1, 3, 5])
    assert [belongs(n, "final") for n in range(4)] == [False, True, False, True]
    with pytest.raises(ValueError, match=r"unknown split 'finl': did you mean 'final'\?"):
        numbers("finl", 1)


@pytest.mark.parametrize("part", ["choose", "final"])
def test_answers_of_one_part(part: str, tiny: Path, tmp_path: Path) -> None:
    specs = [Spec.parse(f"{name}tile_factor=1") for name in ("quest:", "topk:", "router:q=0.3,")]
    grid = RingGrid(
        models=(str(tiny),), tasks=("probe-needle", "probe-scattered:keys=8,questions=3"), contexts=(512,),
        specs=tuple(entrants(specs, specs[:1])), budgets=(4,), n=2, part=part,
    )  # fmt: skip
    with Store(tmp_path / "results.db") as store:
        answers = ring.answers(grid, store, specs[:1])
        wanted = {"choose": {0, 2}, "final": {1, 3}}[part]
        assert {r.cell.number for r in store.rows()} == wanted  # the other part was not even run
        other = dataclasses.replace(grid, part="final" if part == "choose" else "choose")
        ring.answers(other, store, specs[:1])
        again = ring.answers(grid, store, specs[:1])
    assert [g.rows for g in again.groups] == [g.rows for g in answers.groups]
    assert len(answers.groups) == 2
    for g, listed in zip(answers.groups, answers.duels, strict=True):
        assert {r.cell.number for rows in g.rows.values() for r in rows} == wanted
        by = {d.policy: d for d in listed if d.against == "quest:tile_factor=1"}
        assert by["topk:tile_factor=1"].spent.equal
        assert by["router:q=0.3,tile_factor=1"].comparison is None
        assert "keeps up to" in by["router:q=0.3,tile_factor=1"].verdict
    text = " ".join("\n".join(t.text() for t in report.answer_tables(answers, part)).split())  # titles may wrap
    assert f"the {part} part: 2 examples, 6 questions" in text
    assert "Between policies, all of the above" in text


# -- captured layers ---------------------------------------------------------------------------------------------------


def judged(
    name: str,
    number: int,
    layer: int,
    error: float,
    *,
    hit: float | None = 0.5,
    kept: float = 10.0,
    gold: tuple[float, float] | tuple[None, None] = (0.25, 0.5),
) -> Judged:
    return Judged("task", 512, 0, number, layer, name, 4, Quality(1 - error, error, hit, hit, kept, *gold))


def bouts_of(**errors: list[float]) -> Captured:
    rows = [
        judged(name, i, layer, error + layer / 8)
        for name, listed in errors.items()
        for i, error in enumerate(listed)
        for layer in (0, 1)
    ]
    return Captured(rows, ["quest"])


def test_bouts_are_of_prompts() -> None:
    captured = bouts_of(quest=[0.25] * 8, topk=[0.125] * 7 + [0.5])
    (bout,) = captured.bouts[None]
    assert (bout.policy, bout.against, bout.wins, bout.losses, bout.spent.equal) == ("topk", "quest", 7, 1, True)
    assert bout.error.value == pytest.approx((0.125 * 7 + 0.5) / 8 - 0.25)
    assert bout.error.n == 8
    assert (bout.hit, bout.p_hit) == (0, 1)
    means = {s.policy: s for s in captured.scores()}
    assert means["quest"].error == pytest.approx(0.25 + 1 / 16)
    assert means["quest"].mass == pytest.approx(0.75 - 1 / 16)
    assert {s.policy: s.error for s in captured.scores(layer=1)}["quest"] == pytest.approx(0.375)
    (better,) = bouts_of(quest=[0.25] * 8, topk=[0.125] * 8).bouts[None]
    assert better.p == pytest.approx(2 / 2**8)
    assert better.verdict == "better"


def test_bouts_at_other_budgets_are_not_counted() -> None:
    rows = [judged("quest", i, 0, 0.25) for i in range(8)]
    rows += [judged("topk", i, 0, 0.125, kept=10.06 if i == 3 else 10.0) for i in range(8)]
    (bout,) = Captured(rows, ["quest"]).bouts[None]
    assert not bout.spent.fair
    assert bout.verdict == "keeps up to 0.6% more"
    less = [dataclasses.replace(r, quality=dataclasses.replace(r.quality, effective_budget=7.5)) for r in rows[8:]]
    (bout,) = Captured([*rows[:8], *less], ["quest"]).bouts[None]
    assert bout.verdict == "better, with 75% of the blocks"


def test_prompts_without_gold() -> None:
    rows = [judged(name, i, 0, 0.25, hit=None, gold=(None, None)) for name in ("quest", "topk") for i in range(3)]
    captured = Captured(rows, ["quest"])
    (bout,) = captured.bouts[None]
    assert (bout.hit, bout.p_hit, bout.gold, bout.p_gold) == (None, None, None, None)
    assert {(s.gold, s.gold_kept, s.gold_there) for s in captured.scores()} == {(None, None, None)}
    for text in (report.bout_table([bout], "title").text(), report.score_table(captured.scores(), "title").text()):
        assert "hit" not in text.splitlines()[2]
        assert "gold" not in text.splitlines()[2]
    assert [t.title for t in report.layer_tables(captured)] == ["Mass by layer, budget 4", "Error by layer, budget 4"]


def test_gold_mass_adds_up_over_layers() -> None:
    """A layer that hardly looks at gold counts for little, whatever share of it is kept."""
    rows = []
    for i in range(8):
        rows += [judged("quest", i, 0, 0.25, gold=(0.0, 0.5)), judged("quest", i, 1, 0.25, gold=(1.5, 1.5))]
        rows += [judged("topk", i, 0, 0.25, gold=(0.5, 0.5)), judged("topk", i, 1, 0.25, gold=(0.0, 1.5))]
    captured = Captured(rows, ["quest"])
    found = {s.policy: s for s in captured.scores()}
    assert (found["quest"].gold, found["topk"].gold) == (0.75, 0.25)  # the means of the layers' shares would be equal
    assert (found["quest"].gold_kept, found["quest"].gold_there) == (12, 16)
    assert {s.policy: s.gold for s in captured.scores(layer=0)} == {"quest": 0, "topk": 1}
    (bout,) = captured.bouts[None]
    assert (bout.gold, bout.p_gold) == (-0.5, 2 / 2**8)
    lines = report.bout_table([bout], "title").text().splitlines()
    assert "gold mass  Holm p" in lines[2]
    assert "-0.500   0.008" in lines[4]
    table = next(t for t in report.layer_tables(captured) if t.title == "Gold mass by layer, budget 4")
    shown = [line.split() for line in table.text().splitlines()]
    assert shown[2] == ["layer", "of", "all", "quest", "topk"]
    assert shown[4:6] == [["0", "25.0%", "0.000", "1.000"], ["1", "75.0%", "1.000", "0.000"]]
    data: Any = json.loads(report.as_json({}, None, captured, []))
    listed = {s["policy"]: s for s in data["captured"]["all"]["policies"]}
    assert (listed["quest"]["gold"], listed["quest"]["gold_there"]) == (0.75, 16)
    assert {s["policy"]: s["gold"] for s in data["captured"]["by_layer"]["1"]} == {"quest": 1, "topk": 0}
    assert data["captured"]["all"]["bouts"][0]["p_gold"] == 2 / 2**8


def test_layers_one_by_one() -> None:
    captured = bouts_of(quest=[0.25, 0.5], topk=[0.125, 0.25])
    tables = {t.title: t for t in report.layer_tables(captured)}
    assert list(tables) == [f"{what} by layer, budget 4" for what in ("Mass", "Error", "Hit", "Gold mass")]
    lines = tables["Error by layer, budget 4"].text().splitlines()
    assert lines[2].split() == ["layer", "quest", "topk"]
    assert lines[4].split() == ["0", "0.3750", "0.1875"]
    assert lines[5].split() == ["1", "0.5000", "0.3125"]


# -- cost --------------------------------------------------------------------------------------------------------------


def test_costs_are_beside_quests() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, 512, 16, generator=generator) for h in (4, 2))
    names = ("dense", "topk:tile_factor=1", "quest:tile_factor=1", "router:tile_factor=1")
    variants: list[tuple[Spec, int]] = [(Spec.parse(n), 0 if n == "dense" else 4) for n in names]
    variants.append((Spec.parse("router/matched:tile_factor=1"), 4))
    by_policy = {c.policy: c for c in cost.costs(variants, q, k, 0.25, seconds=0.01)}
    assert list(by_policy) == ["quest", *names[1:]]
    assert by_policy["quest"].ratio == 1
    assert all(c.tile_budget == 4 and c.milliseconds > 0 and c.ratio > 0 for c in by_policy.values())
    assert [c.vectors for c in by_policy.values()] == [2, 1, 2, 1]
    assert "x quest" in report.cost_table(list(by_policy.values()), "here").text()


def test_json_has_no_nan() -> None:
    captured = bouts_of(quest=[0.25], topk=[0.125])  # one prompt: no interval
    data: Any = json.loads(report.as_json({"split": "choose"}, None, captured, []))
    assert data["captured"]["all"]["bouts"][0]["error"]["low"] is None
    assert data["captured"]["by_layer"]["1"][0]["policy"] == "quest"


def test_several_models_are_taken_together_by_task() -> None:
    one = group(dict.fromkeys(EVEN, EVEN["quest"]), ANSWERS)
    other, elsewhere = dataclasses.replace(one, model="n"), dataclasses.replace(one, task="another")
    answers = ring.Answers([one, other, elsewhere], {"m": "M", "n": "N"}, ["quest"])
    assert list(answers.over_models) == [("task", 512)]
    assert answers.over_models["task", 512] == duels([one, other], ["quest"])
    assert answers.over_models["task", 512][0].comparison is not None
    assert answers.over_models["task", 512][0].comparison.wins == 34
    titles = [t.title for t in report.answer_tables(answers, "choose")]
    assert "Between policies, all models: task at 512 tokens" in titles
    assert "Between policies: task at 512 tokens on N" in titles
    (listed,) = json.loads(report.as_json({}, answers, None, []))["over_models"]
    assert (listed["task"], listed["duels"][0]["comparison"]["wins"]) == ("task", 34)
    assert ring.Answers([one, elsewhere], {"m": "M"}, ["quest"]).over_models == {}


def test_tallies_count_the_questions_of_all_models() -> None:
    one = group(dict.fromkeys(EVEN, EVEN["quest"]), ANSWERS)
    none = {variant: rows for variant, rows in one.rows.items() if variant[0] != "topk"}
    groups = [one, dataclasses.replace(one, model="n"), dataclasses.replace(one, task="another")]
    answers = ring.Answers(groups, {"m": "M", "n": "N"}, ["quest"])
    for tally in answers.tallies:
        correct = one.correct((tally.policy, tally.budget))
        assert tally.accuracy["task"].n == 2 * len(correct) == 2 * tally.accuracy["another"].n
        assert {e.value for e in tally.accuracy.values()} == {sum(correct) / len(correct)}
        assert tally.effective_budget == 10
    assert len({tuple(e.value for e in t.accuracy.values()) for t in answers.tallies}) > 1
    assert report.answer_tables(answers, "choose")[0].title == "All 2 models at 512 tokens, the choose part"
    assert [t["policy"] for t in json.loads(report.as_json({}, answers, None, []))["tallies"]] == [*EVEN]
    absent = [*groups[:2], dataclasses.replace(groups[2], rows=none)]  # a policy that did not run everywhere
    assert [t.policy for t in ring.Answers(absent, {}, ["quest"]).tallies] == [n for n in EVEN if n != "topk"]


def test_the_picture_has_a_row_for_each_policy_and_a_panel_for_each_task() -> None:
    one = group(dict.fromkeys(EVEN, EVEN["quest"]), ANSWERS)
    tallies = ring.Answers([one, dataclasses.replace(one, task="another:keys=2")], {"m": "M"}, ["quest"]).tallies
    axes = figure.picture(tallies, 1).axes
    assert [a.get_title(loc="left").splitlines()[0] for a in axes] == ["task, 512 tokens", "another, 512 tokens"]
    assert sorted(label.get_text().partition(",")[0] for label in axes[0].get_yticklabels()) == sorted(EVEN)
    drawn = sorted(float(line.get_xdata()[0]) for line in axes[0].lines if len(line.get_xdata()) == 1)
    assert drawn == sorted(t.accuracy["task"].value for t in tallies)


def test_contexts_may_have_tasks_of_their_own() -> None:
    one = group(dict.fromkeys(EVEN, EVEN["quest"]), ANSWERS)
    elsewhere = dataclasses.replace(one, task="another", context=0)  # a document of its own length
    answers = ring.Answers([one, elsewhere], {"m": "M"}, ["quest"])
    titles = [t.title for t in report.answer_tables(answers, "final")]
    assert titles[:2] == [
        "All tasks at 512 tokens, the final part",
        "All tasks, documents of their own lengths, the final part",
    ]
    axes = figure.picture(answers.tallies, 1).axes
    shown = [a.get_title(loc="left").splitlines()[0] for a in axes if a.get_visible()]
    assert shown == ["task, 512 tokens", "another"]
    assert all(a.get_yticklabels()[0].get_text() for a in axes if a.get_visible())
