"""The first look at a router: who stands in it, where the dots are, and when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic import RIGHT, add

from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store
from closecall_lab.report import compose
from closecall_lab.report.gather import Gathered, gather
from closecall_lab.report.router_read import KINDS, TITLE, companions, read, router_read

pytest.importorskip("matplotlib")


def test_whom_a_router_is_read_beside() -> None:
    found = companions(Spec.parse("router-on-quest:q=0.3,block=32"), 8)
    assert list(found) == list(KINDS)
    assert found["topk"] == ("quest:block=32", 8)
    assert found["matched"] == ("router-on-quest/matched:block=32,q=0.3", 8)


def test_dots_are_where_the_findings_are(gathered: Gathered) -> None:
    figure = router_read("tiny", gathered.settings)
    assert figure is not None
    assert figure.texts[0].get_text() == TITLE
    (axes,) = figure.axes
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == ["dense: every block", "scorer mean", *KINDS.values()]
    at = dict(zip(labels, axes.get_yticks(), strict=True))
    dots = {float(y): float(x) for line in axes.lines if len(line.get_xdata()) == 1 for x, y in [line.get_xydata()[0]]}
    bars = {float(line.get_ydata()[0]): tuple(line.get_xdata()) for line in axes.lines if line.get_marker() == "None"}
    policies = {KINDS[kind]: name for kind, (name, _) in companions(Spec("router"), 8).items()}
    policies["dense: every block"] = "dense"
    assert len(dots) == len(policies) == 6
    for label, policy in policies.items():
        right = RIGHT[policy]
        assert dots[at[label]] == right.count("1") / len(right)
        (finding,) = (f for f in gathered.settings[0].findings if str(f.spec) == policy)
        assert bars[at[label]] == (finding.accuracy.low, finding.accuracy.high)
    read_at = {text.xy[1]: text.get_text() for text in axes.texts}  # type: ignore[attr-defined]
    assert read_at[at["dense: every block"]] == "64.5"
    assert read_at[at[KINDS["router"]]] == "20.2"
    assert axes.get_xlabel() == "questions answered"
    assert "budget 8 (16 a tile), 40 questions" in axes.get_title(loc="left")


def test_scorers_tasks_and_contexts(tmp_path: Path) -> None:
    """A group for each scorer, a row for each task, a column for each context, the smallest budget with a control."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for task, context in (("niah-single", 4096), ("niah-single", 8192), ("niah-multikey", 4096)):
            where: dict[str, Any] = {"task": task, "context": context}
            add(store, "1110", policy="dense", **where)
            for name in ("router", "router-on-quest"):
                for budget in (4, 8, 16):
                    add(store, "1100", policy=name, budget=budget, **where)
            add(store, "1000", policy="router/matched", budget=16, **where)
            add(store, "1000", policy="router/matched", budget=8, **where)
            if task == "niah-multikey":
                add(store, "0000", policy="router-on-quest/last", budget=8, **where)
        settings = gather(store).settings
    readings = {(r.setting.task, r.setting.context): r for s in settings if (r := read(s)) is not None}
    assert {r.budget for r in readings.values()} == {8}
    assert [str(s) for s in readings["niah-single", 4096].routers] == ["router"]
    assert [str(s) for s in readings["niah-multikey", 4096].routers] == ["router", "router-on-quest"]
    figure = router_read("tiny", settings)
    assert figure is not None
    shown = [axes.get_title(loc="left").partition("\n")[0] for axes in figure.axes if axes.get_visible()]
    assert sorted(shown) == ["niah-multikey, 4K", "niah-single, 4K", "niah-single, 8K"]
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == [
        "dense: every block", "scorer mean", KINDS["router"], KINDS["matched"], "scorer quest", KINDS["router"],
        KINDS["last"],
    ]  # fmt: skip


def test_a_router_without_controls_is_not_drawn(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for name, budget in (("dense", 0), ("topk", 8), ("router", 8)):
            add(store, "1100", policy=name, budget=budget)
        found = gather(store)
    assert router_read("tiny", found.settings) is None
    assert "router-tiny" not in compose.page(found).figures


def test_it_stands_first_on_the_page(gathered: Gathered) -> None:
    page = compose.page(gathered)
    assert next(iter(page.figures)) == "router-tiny"
    assert f"![{TITLE}, tiny](router-tiny.png)" in page.markdown()
    assert f'alt="{TITLE}, tiny"' in page.html()
