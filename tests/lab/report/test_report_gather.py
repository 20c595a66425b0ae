"""Every number of a report, recomputed by hand from answers that are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.stats import binom
from synthetic import RIGHT, N, add

from closecall.models.load import own_name
from closecall_lab.eval.store import Store
from closecall_lab.report import tables
from closecall_lab.report.gather import Gathered, Setting, gather, public

Z = 1.959963984540054


def wilson(hits: int, n: int) -> tuple[float, float]:
    p, z2 = hits / n, Z * Z
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return middle - half, middle + half


def mcnemar(wins: int, losses: int) -> float:
    total = wins + losses
    return min(1.0, 2 * float(binom.cdf(min(wins, losses), total, 0.5))) if total else 1.0


def holm(p: list[float]) -> list[float]:
    order = sorted(range(len(p)), key=p.__getitem__)
    found, highest = [0.0] * len(p), 0.0
    for place, i in enumerate(order):
        highest = max(highest, min(1.0, p[i] * (len(p) - place)))
        found[i] = highest
    return found


def mean(policy: str) -> float:
    return RIGHT[policy].count("1") / N


def only(gathered: Gathered) -> Setting:
    (setting,) = gathered.settings
    return setting


def test_accuracy_and_paired_recall(gathered: Gathered) -> None:
    setting = only(gathered)
    assert sorted(str(f.spec) for f in setting.findings) == sorted(RIGHT)
    for f in setting.findings:
        answers = RIGHT[str(f.spec)]
        assert (f.accuracy.value, f.accuracy.n) == (mean(str(f.spec)), N)
        assert (f.accuracy.low, f.accuracy.high) == pytest.approx(wilson(answers.count("1"), N))
        kept = sum(a == d == "1" for a, d in zip(answers, RIGHT["dense"], strict=True))
        assert f.paired is not None
        assert (f.paired.value, f.paired.n) == (kept / 36, 36)
        assert (f.paired.low, f.paired.high) == pytest.approx(wilson(kept, 36))


def test_every_test_and_its_correction(gathered: Gathered) -> None:
    setting = only(gathered)
    pairs = [(a[0], b[0]) for a, b, _ in setting.tests]
    assert sorted(pairs) == sorted(
        [("topk", "dense"), ("quest", "dense"), ("quest", "topk"), ("router", "dense"), ("router", "topk")]
        + [("router", f"router/{c}") for c in ("matched", "random", "last")]
    )
    expected = []
    for (a, b), (_, _, test) in zip(pairs, setting.tests, strict=True):
        both = list(zip(RIGHT[a], RIGHT[b], strict=True))
        assert (test.wins, test.losses) == (both.count(("1", "0")), both.count(("0", "1")))
        assert test.difference.value == pytest.approx(mean(a) - mean(b))
        expected.append(mcnemar(test.wins, test.losses))
    assert [t.mcnemar for _, _, t in setting.tests] == pytest.approx(expected)
    assert [t.mcnemar_holm for _, _, t in setting.tests] == pytest.approx(holm(expected))
    assert setting.tests[pairs.index(("router", "router/matched"))][2].mcnemar == pytest.approx(0.625)  # 3 vs 1


def test_the_lift_splits_exactly(gathered: Gathered) -> None:
    (split,) = only(gathered).splits
    assert split.policy == "router"
    assert split.parts.lift.value == pytest.approx(mean("router") - mean("topk"))
    assert split.parts.budget.value == pytest.approx(mean("router/matched") - mean("topk"))
    assert split.parts.selectivity.value == pytest.approx(mean("router") - mean("router/matched"))
    assert split.sound


def test_by_layer_and_hop_and_time(gathered: Gathered) -> None:
    setting = only(gathered)
    router, dense = setting.find("router", 8), setting.find("dense", 0)
    assert router is not None
    assert dense is not None
    assert router.layers == [0, 1, 2]
    assert router.by_layer["hit"] == [0.25, 0.5, 0.75]
    assert router.by_layer["hit_union"] == [1, 1, 1]
    assert router.by_layer["trigger_rate"] == pytest.approx([0.4] * 3)
    assert router.by_layer["asked_triggered"] == [0.25] * 3
    assert router.by_hop == pytest.approx([0.9, 0.5])
    assert (router.prefill_seconds, router.prefill_vs_dense) == (3.0, 0.75)
    assert dense.by_layer["trigger_rate"] == [None] * 3
    assert (router.budget_text, dense.budget_text) == ("8 (16 a tile)", "every block")
    matched = setting.find("router/matched", 8)
    assert matched is not None
    assert matched.budget_text == "as much as 8 (16 a tile)"


def test_warnings_of_runs_are_shown(gathered: Gathered) -> None:
    assert only(gathered).notes == ["Warning: 8192 tokens are more than the 4096 that tiny was trained for"]


Fill = Callable[[Store], None]


def gather_of(tmp_path: Path, fill: Fill, **options: object) -> Gathered:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        fill(store)
        return gather(store, **options)  # type: ignore[arg-type]


def test_an_empty_store(tmp_path: Path) -> None:
    found = gather_of(tmp_path, lambda store: None)
    assert found.settings == []
    assert found.notes == [f"{tmp_path / 's.db'} has no results of what was asked: `closecall eval` puts them there."]


def test_a_policy_that_hardly_ran_does_not_shrink_the_others(tmp_path: Path) -> None:
    def fill(store: Store) -> None:
        add(store, "1111100000", policy="dense")
        add(store, "11111000", policy="topk", budget=8)
        add(store, "111", policy="quest", budget=8)

    setting = only(gather_of(tmp_path, fill))
    assert {f.variant: f.line.examples for f in setting.findings} == {("dense", 0): 8, ("topk", 8): 8}
    assert setting.notes == [
        "quest@8 is left out: it ran 3 of dense's 10 examples; go on with the same `closecall eval`.",
        "Examples left out, because not every policy has run them, or not as they now are: 2; go on with the same "
        "`closecall eval`.",
    ]


def test_who_ran_other_examples_than_dense_is_left_out(tmp_path: Path) -> None:
    def fill(store: Store) -> None:
        add(store, "11", policy="dense")
        add(store, "11", policy="topk", budget=8, first=5)

    setting = only(gather_of(tmp_path, fill))
    assert [f.variant for f in setting.findings] == [("dense", 0)]
    assert setting.notes[0].startswith("topk@8 is left out: it ran 0 of dense's 2 examples")


def test_without_dense_there_is_no_paired_recall(tmp_path: Path) -> None:
    setting = only(gather_of(tmp_path, lambda store: add(store, "1100", policy="router", budget=8)))
    assert setting.findings[0].paired is None
    assert setting.notes == [
        "dense was not run here, so there is no paired recall.",
        "router, 8 (16 a tile): no split of its lift, which needs top-k on its scorer and its matched control.",
    ]
    assert "paired" not in tables.policies(setting).text().splitlines()[2]


def test_dense_that_answers_nothing(tmp_path: Path) -> None:
    def fill(store: Store) -> None:
        add(store, "0000", policy="dense")
        add(store, "1000", policy="topk", budget=8)

    setting = only(gather_of(tmp_path, fill))
    assert setting.notes == ["dense answers nothing here, so there is no paired recall: the model cannot do this task."]
    assert "nan" not in tables.policies(setting).text()


def test_examples_that_changed_in_between(tmp_path: Path) -> None:
    def fill(store: Store) -> None:
        add(store, "1111", policy="dense")
        add(store, "111", policy="topk", budget=8)
        add(store, "0", policy="topk", budget=8, first=3, salt="changed")

    setting = only(gather_of(tmp_path, fill))
    assert [f.line.examples for f in setting.findings] == [3, 3]
    assert [f.accuracy.value for f in setting.findings] == [1.0, 1.0]
    (note,) = setting.notes
    assert note.startswith("Examples left out, because not every policy has run them, or not as they now are: 2;")


def test_a_control_that_is_off_is_named(tmp_path: Path) -> None:
    def fill(store: Store) -> None:
        add(store, "11", policy="topk", budget=8)
        add(store, "11", policy="router", budget=8, effective=20.0)
        add(store, "11", policy="router/matched", budget=8, effective=20.5)

    setting = only(gather_of(tmp_path, fill))
    assert any("kept 2.50% more or less" in note for note in setting.notes)


def test_a_budget_too_small_to_decide_is_named(tmp_path: Path) -> None:
    setting = only(gather_of(tmp_path, lambda store: add(store, "11", policy="router", budget=2)))
    assert any(note.startswith("Warning: tile budget 4 can leave one free block") for note in setting.notes)


def test_warnings_that_differ_in_numbers_are_one(tmp_path: Path) -> None:
    def fill(store: Store) -> None:
        for number, tokens in enumerate((900, 901, 903)):
            said = [f"{tokens} tokens are more than 512", "something else"]
            add(store, "1", policy="dense", first=number, warnings=said)

    setting = only(gather_of(tmp_path, fill))
    assert setting.notes == ["Warning: 900 tokens are more than 512 (and 2 like it)", "Warning: something else"]


def test_shared_contexts_get_intervals_over_contexts(tmp_path: Path) -> None:
    def fill(store: Store) -> None:
        add(store, ["11", "11", "10", "11"], policy="dense")
        add(store, ["11", "00", "00", "11"], policy="topk", budget=8)

    setting = only(gather_of(tmp_path, fill))
    assert setting.shared
    topk = setting.find("topk", 8)
    assert topk is not None
    assert (topk.accuracy.value, topk.accuracy.n) == (0.5, 8)
    assert (topk.accuracy.low, topk.accuracy.high) == (0.0, 1.0)  # contexts are right or wrong as a whole
    assert topk.paired is not None
    assert (topk.paired.value, topk.paired.n) == (4 / 7, 7)
    made = tables.tests(setting)
    assert made is not None
    assert "contexts p" in made.text()


def test_all_right_is_not_certain(tmp_path: Path) -> None:
    """Four contexts of two questions: as sure as four questions, not as eight, and not beyond all doubt."""

    def fill(store: Store) -> None:
        add(store, ["11"] * 4, policy="dense")
        add(store, ["00"] * 4, policy="topk", budget=8)

    dense, topk = only(gather_of(tmp_path, fill)).findings
    assert (dense.accuracy.value, dense.accuracy.n) == (1.0, 8)
    assert (dense.accuracy.low, dense.accuracy.high) == pytest.approx(wilson(4, 4))
    assert (topk.accuracy.low, topk.accuracy.high) == pytest.approx(wilson(0, 4))
    assert topk.paired == topk.accuracy


def test_scores_letters_and_format_failures(tmp_path: Path) -> None:
    says = ["The correct answer is (A)", "no idea", "(B)", "hm"]
    picks = {"outputs": says, "by_logits": [True, True, False, False]}

    def fill(store: Store) -> None:
        add(store, "1000", policy="dense", scores=[1.0, 0.5, 0.5, 0.0], **picks)  # type: ignore[arg-type]

    setting = only(gather_of(tmp_path, fill))
    (found,) = setting.findings
    assert setting.graded
    assert found.line.score.value == 0.5
    assert found.by_logits is not None
    assert (found.by_logits.value, found.line.no_letter) == (0.5, 0.5)
    text = tables.policies(setting).text()
    assert "by logits" in text
    assert "no letter" in text


def test_models_are_chosen_by_name_or_fingerprint(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for letter, name in (("a", "probe"), ("b", "/home/me/models/probe"), ("c", "org/other")):
            store.add_model(letter * 64, name, {})
            add(store, "1", policy="dense", model=letter * 64)
        assert gather(store).models == ["probe aaaaaaaa", "probe bbbbbbbb", "org/other"]
        assert gather(store, models=["org/other"]).models == ["org/other"]
        assert gather(store, models=["b" * 8]).models == ["probe bbbbbbbb"]
        with pytest.raises(ValueError, match="unknown model in the store 'org/othr': did you mean 'org/other'"):
            gather(store, models=["org/othr"])


def test_names_do_not_tell_whose_disk_it_was() -> None:
    assert own_name("/data/models/tiny") == "tiny"
    assert own_name("owner/name") == "owner/name"
    assert own_name("probe:qwen3:2") == "probe:qwen3:2"
    assert public("longbench-v2:length=medium,data=/home/me/x.json") == "longbench-v2:length=medium"
    assert public("longbench-v2:data=x.json") == "longbench-v2"
