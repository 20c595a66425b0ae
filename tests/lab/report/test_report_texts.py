"""Texts in a report: compared by KL to dense, in tables of their own, and never pooled with answers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from synthetic import SAVED, add
from test_report_pages import run
from test_standings import row_of

from closecall_lab.eval import statistics
from closecall_lab.eval.store import Store
from closecall_lab.report import compose, standings, texts
from closecall_lab.report.gather import Gathered, gather
from closecall_lab.report.rivals import NEAREST
from closecall_lab.report.verdict import verdict

CODE = {("quest", 8): (0.05, 0.06, 0.04), ("router-on-quest", 8): (0.03, 0.03, 0.05), ("auto", 8): (0.02, 0.01, 0.03)}
PROSE = {("quest", 8): (0.10, 0.20), ("auto", 8): (0.05, 0.25), ("quest", 4): (0.3, 0.4), ("auto", 4): (0.2, 0.3)}
GAPS = [0.02 - 0.05, 0.01 - 0.06, 0.03 - 0.04, 0.05 - 0.10, 0.25 - 0.20]  # auto against quest at budget 8, over all

# As a store has them, with no budget beside them.
TUNED, OTHER = "tuned:smollm2", SAVED  # one that we ship, by the name that people type, and another one


def fill(store: Store, *, answers: bool) -> None:
    store.add_model("a" * 64, "tiny", {})
    for kind, listed in (("text:kind=code", CODE), ("text:kind=prose", PROSE)):
        for (policy, budget), kl in listed.items():
            effective = {"quest": 15.0, "router-on-quest": 20.5, "auto": 15.0}[policy] * budget / 8
            wide = {"policy": policy, "budget": budget, "effective": effective}
            add(store, "0" * len(kl), task=kind, kl=kl, scores=[1 - x for x in kl], **wide)
    if answers:
        for policy, budget, right in (("dense", 0, "1111"), ("quest", 8, "0111"), ("auto", 8, "1111")):
            add(store, right, policy=policy, budget=budget)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    with Store(tmp_path_factory.mktemp("texts") / "s.db") as store:
        fill(store, answers=True)
        return gather(store)


def test_texts_and_answers_stay_apart(mixed: Gathered) -> None:
    assert [s.task for s in mixed.settings] == ["niah-multikey"]
    assert [t.task for t in mixed.texts] == ["text:kind=code", "text:kind=prose"]
    counted, nearer, cells = (table.markdown() for table in standings.tables(mixed))
    # One example of four differs: agreement on texts must not make this smaller.
    assert row_of(counted, "tiny", "auto", "quest")[3:] == ["1", "0", "0", "1", "0", "1.000", "1.000"]
    assert "text:" not in cells
    assert "niah" not in nearer


def test_the_table_over_all_texts(mixed: Gathered) -> None:
    table = texts.nearer(mixed.texts)
    assert table is not None
    text = table.markdown()
    row = row_of(text, "tiny", "auto", "8 (16 a tile)", "quest", "15.0", "0.0720")
    assert row[6:10] == ["15.0", "0.0900", "4", "1"]  # blocks, KL, nearer, farther
    assert float(row[10]) == pytest.approx(statistics.sign_flips(GAPS), abs=1e-3)
    assert row_of(text, "tiny", "auto", "8 (16 a tile)", "router-on-quest", "15.0", "0.0200")[6:10] == [
        "20.5", "0.0367", "3", "0",
    ]  # fmt: skip
    assert row_of(text, "tiny", "auto", "4 (8 a tile)")[8:10] == ["2", "0"]
    raw = [statistics.sign_flips([-0.02, 0.03 - 0.06, 0.05 - 0.04]), statistics.sign_flips(GAPS), 0.25, 0.5]
    assert sorted(float(line.split(" | ")[-2]) for line in text.splitlines() if "| tiny" in line) == pytest.approx(
        sorted(raw), abs=1e-3
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    """With a tuned policy, whose blocks are of 32 keys, on all texts, and another one on code."""
    with Store(tmp_path_factory.mktemp("tuned") / "s.db") as store:
        fill(store, answers=False)
        for task, kl in (("text:kind=code", (0.01, 0.02, 0.05)), ("text:kind=prose", (0.01, 0.3))):
            add(store, "0" * len(kl), policy="dense", task=task, kl=[0.0] * len(kl), effective=64.5)
            add(store, "0" * len(kl), policy="tuned:smollm2", task=task, kl=kl, effective=18.0)
        add(store, "000", policy=OTHER, task="text:kind=code", kl=(0.1,) * 3, effective=12.0)
        return gather(store)


def test_a_policy_without_a_budget_meets_each_rival_where_that_reads_as_much(mixed: Gathered, tuned: Gathered) -> None:
    """It keeps 9 blocks of 64 keys: Quest and auto do so best at budget 4, which was run on prose only."""
    table = texts.nearer(tuned.texts)
    assert table is not None
    text = table.markdown()
    met = [r for r in table.rows if r["policy"] == TUNED]
    assert [(r["against"], r["better"], r["worse"]) for r in met] == [
        ("quest", 4, 1), ("router-on-quest", 2, 0), ("auto", 2, 2), (OTHER, 3, 0),
    ]  # fmt: skip
    row = row_of(text, "tiny", TUNED, "its own", "quest", "9.0", "0.0780")  # 18 blocks of 32 keys
    assert row[6:10] == ["12.0", "0.1700", "4", "1"]
    gaps = [0.01 - 0.05, 0.02 - 0.06, 0.05 - 0.04, 0.01 - 0.3, 0.3 - 0.4]
    assert met[0]["p"] == pytest.approx(statistics.sign_flips(gaps))
    assert [r["against"] for r in table.rows if r["policy"] == OTHER] == ["quest", "router-on-quest", "auto"]
    before = texts.nearer(mixed.texts)
    assert before is not None
    budgeted = [r for r in table.rows if r["budget"] != "its own"]
    assert [r | {"holm": 0} for r in budgeted] == [r | {"holm": 0} for r in before.rows]
    assert [r["holm"] for r in table.rows] == pytest.approx(statistics.holm([r["p"] for r in table.rows]))
    assert NEAREST in table.notes
    assert NEAREST not in before.notes


def test_its_kind_of_text_says_so_too(tuned: Gathered) -> None:
    table = next(t for t in tuned.texts[0].tables if t.title.startswith("Between policies"))
    listed = [(r["a"], r["b"]) for r in table.rows]
    assert [b for a, b in listed if a == TUNED] == ["quest@8", "router-on-quest@8", "auto@8", OTHER]
    assert ("auto@8", "quest@8") in listed
    assert not any("dense" in pair for pair in listed)


def test_it_is_a_point_in_the_picture(tuned: Gathered) -> None:
    """At what it kept, in blocks as large as the others', and with its name, whole, where no other name is."""
    figure = texts.curve("tiny", tuned.texts)
    assert figure is not None
    (axes,) = figure.axes
    lines = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() not in (".", "None", "")]
    assert [[9.0, pytest.approx(0.078)]] in lines
    assert [[12.0, pytest.approx(0.1)]] in lines
    (legend,) = figure.legends
    names = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    assert list(names) == ["quest", "router-on-quest", "auto", TUNED, OTHER]
    assert names[TUNED].get_linestyle() == "None"  # type: ignore[union-attr]
    assert names["auto"].get_linestyle() == "-"  # type: ignore[union-attr]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in legend.get_texts()]
    assert all(figure.bbox.x0 < box.x0 and box.x1 < figure.bbox.x1 for box in boxes)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_multiples_of_one_policy_are_a_line(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for policy, kl, kept in (
            (TUNED, 0.02, 30.0),
            (f"{TUNED}:times=0.5", 0.05, 16.0),
            (f"{TUNED}:times=2", 0.01, 56),
        ):
            add(store, "00", policy=policy, task="text:kind=code", kl=(kl, kl), effective=kept)
        found = gather(store)
    figure = texts.curve("tiny", found.texts)
    assert figure is not None
    (line,) = [line for line in figure.axes[0].lines if line.get_marker() not in (".", "None", "")]
    assert line.get_xydata().tolist() == [
        [8, pytest.approx(0.05)],
        [15, pytest.approx(0.02)],
        [28, pytest.approx(0.01)],
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [TUNED]
    assert [line.get_linestyle() for line in legend.legend_handles] == ["-"]  # type: ignore[union-attr]
    assert texts.nearer(found.texts) is None  # nor do they meet each other


def test_a_text_has_its_own_tables_on_the_page(mixed: Gathered) -> None:
    text = compose.page(mixed).text()
    assert "text:kind=code at 8K tokens, tiny" in text
    assert "KL to dense: 3 texts, 300 positions" in text
    code = text[text.index("text:kind=code at 8K") : text.index("text:kind=prose at 8K")]
    assert "paired recall" not in code
    assert "KL to dense along the text" in code
    assert "dense answers nothing" not in text


def test_the_verdict_speaks_of_both(mixed: Gathered) -> None:
    said = verdict(mixed)
    assert said[0] == "tiny: niah-multikey at 8K, 4 questions; dense answers 100%"
    nearest = "auto, 8 (16 a tile), with a mean KL of 0.0720, reading 23% of the blocks."  # 15 of 64
    assert f"tiny: 5 texts read; nearest to dense: {nearest}" in said


@pytest.mark.parametrize(
    ("code", "prose", "nearest"),
    [
        ((0.01, 0.01, 0.01), (0.01, 0.01), f"{TUNED}, with a mean KL of 0.0100, reading 28% of the blocks."),
        ((0.01, 0.01, 0.01), (0.01, 0.90), "auto, 8 (16 a tile), with a mean KL of 0.0720, reading 23% of the blocks."),
        ((0.01, 0.01, 0.01), (), "auto, 8 (16 a tile), with a mean KL of 0.0720, reading 23% of the blocks."),
    ],
    ids=["nearest", "not the nearest", "fewer texts"],
)
def test_the_verdict_hears_a_policy_without_a_budget(
    tmp_path: Path, code: tuple[float, ...], prose: tuple[float, ...], nearest: str
) -> None:
    with Store(tmp_path / "s.db") as store:
        fill(store, answers=False)
        for task, kl in (("text:kind=code", code), ("text:kind=prose", prose)):
            add(store, "0" * len(kl), policy="dense", task=task, kl=[0.0] * len(kl))
            add(store, "0" * len(kl), policy="tuned:smollm2", task=task, kl=kl, effective=18.0)
        assert verdict(gather(store)) == [f"tiny: 5 texts read; nearest to dense: {nearest}"]


def test_the_verdict_on_questions_hears_it_too(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for policy, budget, right in (("dense", 0, "1111"), ("auto", 8, "0111"), ("tuned:smollm2", 0, "1111")):
            add(store, right, policy=policy, budget=budget)
        said = verdict(gather(store))
    assert said[1].startswith(f"Closest to dense: {TUNED} keeps 100% of its answers")


def test_of_equals_the_one_that_reads_fewer_keys_is_named(tmp_path: Path) -> None:
    """18 blocks of 32 keys are fewer than 15 of 64."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        add(store, "1111", policy="dense")
        add(store, "1111", policy="auto", budget=8, effective=15.0)
        add(store, "1111", policy="tuned:smollm2", effective=18.0)
        said = verdict(gather(store))
    assert said[1].startswith(f"Closest to dense: {TUNED} keeps 100% of its answers, reading 9.0 blocks of 64 keys")


def test_the_verdict_compares_where_most_was_asked(tmp_path: Path) -> None:
    """Two questions at another length, all answered, are less than eight of which seven are."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for context, right in ((8192, "1" * 8), (16_384, "11")):
            add(store, right, policy="dense", context=context)
        add(store, "0" + "1" * 7, policy="auto", budget=8)
        add(store, "00" + "1" * 6, policy="quest", budget=8)
        add(store, "11", policy="auto", budget=16, context=16_384)
        said = verdict(gather(store))
    assert said[1].startswith("Closest to dense: auto, 8 (16 a tile) keeps 88% of its answers")


def test_the_verdict_compares_the_same_texts(tmp_path: Path) -> None:
    """As many texts are not the same texts: what two policies read is told, not what one read elsewhere."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for policy, task, kl in (("quest", "code", 0.2), ("auto", "code", 0.1), ("topk", "prose", 0.01)):
            add(store, "00", policy=policy, budget=8, task=f"text:kind={task}", kl=(kl, kl))
        (said,) = verdict(gather(store))
    assert said.startswith("tiny: 2 texts read; nearest to dense: auto, 8 (16 a tile), with a mean KL of 0.1000")


def test_a_store_of_texts_alone(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        fill(store, answers=False)
    run("report", "--store", str(tmp_path / "s.db"), "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "kl-tiny.png").stat().st_size > 10_000
    assert not list((tmp_path / "out").glob("accuracy*"))
    panel = (tmp_path / "out" / "panel.md").read_text()
    assert panel.startswith("## Who is nearer to dense, over all texts")
    assert "Who beats whom" not in panel


def test_the_picture_shows_means_at_measured_budgets(mixed: Gathered) -> None:
    figure = texts.curve("tiny", mixed.texts)
    assert figure is not None
    (axes,) = figure.axes
    lines = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() not in (".", "None", "")]
    assert [[15.0, pytest.approx(0.072)], [7.5, pytest.approx(0.25)]] in [sorted(x, key=lambda p: p[1]) for x in lines]
    assert axes.get_title(loc="left") == "8K (5 texts)"
    assert texts.curve("tiny", []) is None


def test_dense_alone_is_nothing_to_compare(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        add(store, "11", policy="dense", task="text", kl=(0.0, 0.0))
        found = gather(store)
    assert texts.nearer(found.texts) is None
    assert texts.curve("tiny", found.texts) is None
    assert verdict(found) == ["tiny: 2 texts read by dense only."]
