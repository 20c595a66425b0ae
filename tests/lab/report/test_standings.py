"""Who beats whom over many cells, recomputed by hand from answers that are known."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from synthetic import SAVED, add
from test_report_pages import run

from closecall_lab.eval import statistics
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store
from closecall_lab.report import compose, standings, tables
from closecall_lab.report.gather import Gathered, gather
from closecall_lab.report.rivals import NEAREST, rivals
from closecall_lab.report.verdict import verdict

# Two contexts of the same task: at 4K the router wins where it differs, at 8K it loses; two budgets at 8K.
AT_4K = {
    ("topk", 8): "0" * 20 + "1" * 20,
    ("quest", 8): "0" * 30 + "1" * 10,
    ("router", 8): "1" * 40,
    ("router/matched", 8): "0" * 2 + "1" * 38,
    ("router/last", 8): "1" * 40,
    ("auto", 8): "0" * 5 + "1" * 35,
}
AT_8K = {
    ("topk", 8): "1" * 40,
    ("router", 8): "0" * 12 + "1" * 28,
    ("topk", 16): "1" * 40,
    ("router", 16): "0" * 1 + "1" * 39,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("standings") / "s.db"
    with Store(path) as store:
        store.add_model("a" * 64, "tiny", {})
        for context, listed in ((4096, AT_4K), (8192, AT_8K)):
            for (policy, budget), answers in listed.items():
                add(store, answers, policy=policy, budget=budget, context=context)
    return path


@pytest.fixture(scope="module")
def found(stored: Path) -> Gathered:
    with Store(stored) as store:
        return gather(store)


def row_of(table: str, *names: str) -> list[str]:
    rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines())
    (found,) = (row for row in rows if row[: len(names)] == [*names])
    return found


def flips(differences: list[float]) -> float:
    """Every way of exchanging the two, one by one."""
    total = abs(sum(differences))
    ways = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    return sum(way >= total for way in ways) / len(ways)


def test_cells_say_who_wins(found: Gathered) -> None:
    cells = standings.tables(found)[1].markdown()
    router = row_of(cells, "tiny", "niah-multikey", "4K", "router")
    assert "better 20:0 (<0.001)" in router  # against top-k on its scorer, which is topk: said once
    assert router.count("better 20:0 (<0.001)") == 1
    assert "2:0 (0.500)" not in router  # corrected over the setting's tests
    assert any(re.fullmatch(r"2:0 \(\d\.\d+\)", cell) for cell in router)
    assert any(re.fullmatch(r"0:0 \(1\.000\)", cell) for cell in router)
    quest = row_of(cells, "tiny", "niah-multikey", "4K", "quest")
    assert any(re.fullmatch(r"worse 0:10 \(0\.00\d\)", cell) for cell in quest)  # against topk
    lost = row_of(cells, "tiny", "niah-multikey", "8K", "router", "8 (16 a tile)")
    assert any(cell.startswith("worse 0:12 (") for cell in lost)
    assert "topk" not in {row.split(" | ")[3] for row in cells.splitlines() if row.startswith("| tiny")}  # no rival ran


def test_the_count_over_all_cells(found: Gathered) -> None:
    counted = standings.tables(found)[0].markdown()
    row = row_of(counted, "tiny", "router", "topk")
    assert row[3:8] == ["3", "1", "1", "20", "13"]  # cells; better at 4K, worse at 8K with budget 8; won, lost
    # Examples at 8K stand for both budgets: one lost at both counts as two, once.
    gaps = [1.0] * 20 + [-2.0] + [-1.0] * 11
    assert 0.1 < float(row[8]) < 0.5
    assert statistics.sign_flips(gaps) == pytest.approx(float(row[8]), abs=5e-4)  # the table shows three places
    few = [1.0] * 8 + [-2.0] + [-1.0] * 4
    assert statistics.sign_flips(few) == pytest.approx(flips(few))
    assert row_of(counted, "tiny", "router", "router/matched")[3:8] == ["1", "0", "0", "2", "0"]


def test_where_questions_share_contexts_these_are_exchanged(tmp_path: Path) -> None:
    """Four prompts of eight questions: 32 questions won look certain to McNemar, four prompts do not."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        add(store, ["1" * 8] * 4, policy="router", budget=8)
        add(store, ["0" * 8] * 4, policy="topk", budget=8)
        (setting,) = gather(store).settings
        (bout,) = standings.bouts([setting])
    assert bout.test.mcnemar_holm < 1e-6
    assert bout.holm == pytest.approx(2 / 2**4)
    assert (bout.verdict, str(bout)) == ("", "32:0 (0.125)")
    text = tables.policies(setting).text()
    assert any("0.125 (0.125)" in line for line in text.splitlines() if line.startswith("router "))
    assert "by exchanging whole contexts" in text


def test_what_only_all_cells_together_show_is_said(tmp_path: Path) -> None:
    """Four contexts of each of two tasks: no exchange of four can reach 0.05, one of eight does."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for task in ("niah-single", "niah-multikey"):
            add(store, ["1" * 8] * 4, policy="router", budget=8, task=task)
            add(store, ["0" * 8] * 4, policy="topk", budget=8, task=task)
        found = gather(store)
    assert all(bout.verdict == "" for bout in standings.bouts(found.settings))
    (line,) = [line for line in verdict(found) if line.startswith("Tests")]
    said = (
        "Tests, Holm-corrected: beyond chance in no single setting, but over all router is better than topk (p 0.008)."
    )
    assert line == said


def scored(store: Store, policy: str, scores: list[float]) -> None:
    answers = "".join("1" if score == 1 else "0" for score in scores)
    add(store, answers, policy=policy, budget=0 if policy == "dense" else 8, scores=scores)


def test_shares_of_a_point_decide_who_is_better_over_all(tmp_path: Path) -> None:
    """Nobody has full marks, so no question is won; but every score is higher."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        scored(store, "dense", [0.75] * 20)
        scored(store, "topk", [0.25] * 20)
        scored(store, "quest", [0.75] * 20)
        found = gather(store)
    (line,) = [line for line in verdict(found) if line.startswith("Tests")]
    assert "quest is better than topk" in line


def test_a_cells_direction_is_of_the_measure_that_was_tested(tmp_path: Path) -> None:
    """Quest answers ten questions more, and scores less in sum: McNemar's test is of the answers."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        scored(store, "dense", [1.0] * 20)
        scored(store, "topk", [0.75] * 20)
        scored(store, "quest", [1.0] * 10 + [0.0] * 10)
        (setting,) = gather(store).settings
    (bout,) = [b for b in standings.bouts([setting]) if (b.policy, b.against) == ("quest", "topk")]
    assert bout.test.difference.value < 0
    assert (bout.verdict, str(bout)[:11]) == ("better", "better 10:0")


@pytest.mark.parametrize(
    ("quest", "said"), [("0", "quest is worse than dense (p <0.001)"), ("1", "no policy differs from it beyond chance")]
)
def test_against_dense_alone_something_was_tested(tmp_path: Path, quest: str, said: str) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        add(store, "1" * 20, policy="dense")
        add(store, quest * 20, policy="quest", budget=8)
        lines = verdict(gather(store))
    assert f"Tests, Holm-corrected, against dense only: {said}." in lines


def test_the_command_leaves_a_page_to_include(tmp_path: Path, stored: Path, found: Gathered) -> None:
    run("report", "--store", str(stored), "--out", str(tmp_path / "out"))
    page = (tmp_path / "out" / "panel.md").read_text()
    assert re.findall(r"^#+ .*", page, re.MULTILINE) == [
        "## Who beats whom, over all cells",
        "## Who beats whom, cell by cell",
    ]
    assert page == standings.markdown(found)
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.index("Who beats whom, over all cells") < report.index("Accuracy and paired recall")


def test_nothing_tested_nothing_written(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        add(store, "11", policy="dense")
    run("report", "--store", str(tmp_path / "s.db"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "panel.md").exists()


def test_overrides_of_the_grid_have_their_own_topk(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        add(store, "1100", policy="topk:tile_factor=1", budget=8)
        add(store, "0110", policy="topk", budget=8)
        add(store, "1110", policy="quest:tile_factor=1", budget=8)
        add(store, "1111", policy="router:q=0.3,tile_factor=1", budget=8)
        (setting,) = gather(store).settings
    assert {(a[0], b[0]) for a, b, _ in setting.tests} == {
        ("quest:tile_factor=1", "topk:tile_factor=1"), ("router:q=0.3,tile_factor=1", "topk:tile_factor=1"),
    }  # fmt: skip


def test_documents_of_their_own_lengths_have_no_context(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for policy, budget in (("dense", 0), ("topk", 8)):
            add(store, "1100", policy=policy, budget=budget, context=0, task="lm-eval:mine,include=/home/me/tasks")
        text = compose.page(gather(store)).text()
    assert "\nlm-eval:mine, tiny\n" in text
    assert "/home/me" not in text
    assert "0K" not in text


def test_another_scorer_meets_the_papers_best(found: Gathered) -> None:
    counted, cells = (t.markdown() for t in standings.tables(found))
    auto = row_of(cells, "tiny", "niah-multikey", "4K", "auto")
    assert any(cell.startswith("better 25:0") for cell in auto)
    assert row_of(counted, "tiny", "auto", "quest")[6:8] == ["25", "0"]


TUNED, OTHER = str(Spec.parse("tuned:smollm2")), SAVED  # as a store has them
TYPED = "tuned:smollm2"  # as people read it
TWICE = str(Spec.parse("tuned:smollm2:times=2"))
RAN = {  # what each kept, in blocks of 64 keys
    ("dense", 0): 64.5, (TUNED, 0): 14.8, (TWICE, 0): 27.0, (OTHER, 0): 10.0, ("quest", 4): 7.6, ("quest", 8): 15.1,
    ("quest:block=32,tile=32", 8): 7.6, ("topk", 8): 15.1, ("topk:tile_factor=1", 8): 7.6, ("auto", 8): 15.1,
    ("auto", 16): 28.2, ("router-on-quest", 8): 20.6, ("router-on-quest/matched", 8): 20.6,
    ("router-on-quest:tile_factor=1", 8): 10.4, ("auto:tile_factor=1", 8): 7.6,
}  # fmt: skip


def test_who_meets_whom() -> None:
    assert rivals(("auto:tile_factor=1", 8), RAN) == [
        ("dense", ("dense", 0)), ("topk", ("topk:tile_factor=1", 8)),
        ("router-on-quest", ("router-on-quest:tile_factor=1", 8)),
    ]  # fmt: skip
    assert "quest" not in dict(rivals(("router", 8), RAN))
    assert rivals((TUNED, 0), RAN) == [
        ("dense", ("dense", 0)), ("quest", ("quest", 8)), ("router-on-quest", ("router-on-quest", 8)),
        ("auto", ("auto", 8)), ("other", (OTHER, 0)),
    ]  # fmt: skip
    assert rivals((TWICE, 0), RAN)[1:4] == [
        ("quest", ("quest", 8)), ("router-on-quest", ("router-on-quest", 8)), ("auto", ("auto", 16)),
    ]  # fmt: skip
    assert ("other", (TUNED, 0)) not in rivals((OTHER, 0), RAN)  # the two meet once
    assert not any(rivals(variant, RAN) for variant in (("dense", 0), ("router-on-quest/matched", 8)))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    """Two contexts, at the longer one twice the blocks of the tuned policy and of Quest; Quest's 4 was run at both."""
    with Store(tmp_path_factory.mktemp("tuned") / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for context, times in ((4096, 1), (8192, 2)):
            policy = "tuned:smollm2" if times == 1 else "tuned:smollm2:times=2"
            add(store, "1" * 12, policy="dense", context=context)
            add(store, "0" * 2 + "1" * 10, policy=policy, context=context, effective=20.0 * times)
            add(store, "0" * 3 + "1" * 9, policy=OTHER, context=context, effective=9.0)
            add(store, "0" * 12, policy="quest", budget=4, context=context, effective=9.0)
            add(store, "1" * 2 + "0" * 10, policy="auto", budget=4, context=context, effective=9.0)
        add(store, "1" * 12, policy="quest", budget=8, context=8192, effective=18.0)
        return gather(store)


def test_a_policy_without_a_budget_meets_each_rival_where_that_reads_as_much(tuned: Gathered) -> None:
    """Its multiples are counted together, as another policy's budgets are."""
    counted, cells = (t.markdown() for t in standings.tables(tuned))
    assert row_of(counted, "tiny", TYPED, "dense")[3:8] == ["2", "0", "0", "0", "4"]
    assert row_of(counted, "tiny", TYPED, "quest")[3:8] == ["2", "1", "0", "10", "2"]  # of the longer one, with 8
    assert row_of(counted, "tiny", TYPED, "auto")[3:8] == ["2", "0", "0", "20", "4"]
    assert row_of(counted, "tiny", OTHER, "quest")[3:8] == ["2", "2", "0", "18", "0"]
    assert row_of(counted, "tiny", "auto", "quest")[3:8] == ["2", "0", "0", "4", "0"]
    rows = [row.split(" | ") for row in counted.splitlines() if row.startswith("| tiny")]
    assert [row[1] for row in rows].count(TYPED) == 4  # dense, quest, auto and the other one, at both contexts
    raw = [statistics.sign_flips([1.0] * wins + [-1.0] * losses) for wins, losses in ((10, 2), (20, 4))]
    assert [float(row_of(counted, "tiny", TYPED, who)[8].replace("<", "")) for who in ("quest", "auto")] == (
        pytest.approx(raw, abs=1e-3)
    )
    assert NEAREST in counted
    assert NEAREST in cells
    (here,) = [row for row in cells.splitlines() if "| 8K |" in row and f"| {TYPED}:times=2 |" in row]
    assert re.search(r"\| 0:2 \([\d.]+\) \| @8 0:2 \([\d.]+\) \| @4 10:2 \([\d.]+\) \|", here)
    assert f"| {OTHER} 1:0 (1.000) |" in here


def test_its_tests_are_of_the_settings_family(tuned: Gathered) -> None:
    setting = next(s for s in tuned.settings if s.context == 4096)
    pairs = [(a, b) for a, b, _ in setting.tests]
    assert pairs == [
        *(((TUNED, 0), rival) for rival in (("dense", 0), ("quest", 4), ("auto", 4), (OTHER, 0))),
        *(((OTHER, 0), rival) for rival in (("dense", 0), ("quest", 4), ("auto", 4))),
        (("quest", 4), ("dense", 0)), (("auto", 4), ("dense", 0)), (("auto", 4), ("quest", 4)),
    ]  # fmt: skip
    assert [t.mcnemar_holm for *_, t in setting.tests] == pytest.approx(
        statistics.holm([t.mcnemar for *_, t in setting.tests])
    )
    made = tables.tests(setting)
    assert made is not None
    assert f"| {TYPED} | quest, 4 (8 a tile) | +0.83 [" in made.markdown()


def test_the_verdict_counts_multiples_together(tuned: Gathered) -> None:
    (line,) = [line for line in verdict(tuned) if line.startswith("Tests")]
    assert f"{TYPED} is better than quest in 1 of 2" in line
