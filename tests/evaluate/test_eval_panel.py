"""What a panel is made of, and what its names mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import closecall
from closecall.evaluate.panel import DEFAULT, Panel, Spec, split, with_controls

PLAIN: dict[str, Any] = {
    "models": ("m",),
    "tasks": ("t",),
    "contexts": (1024,),
    "specs": (Spec("dense"), Spec("router")),
    "budgets": (8,),
    "n": 2,
}


@pytest.mark.parametrize(
    "text", ["dense", "topk", "router/matched", "router-on-quest/last:q=0.3,rho=3", "quest:block=32"]
)
def test_specs_are_read_and_written(text: str) -> None:
    assert str(Spec.parse(text)) == text


def test_specs_make_policies() -> None:
    assert Spec.parse("router:q=0.3,rho=3").policy(9) == closecall.policy("router", budget=9, q=0.3, rho=3)
    random = Spec.parse("router/random:seed=4")
    assert random.policy(9, number=3) == closecall.policy("router", budget=9, trigger="random", seed=7)
    assert Spec.parse("router").policy(9, number=3) == Spec.parse("router").policy(9)  # nobody else draws
    assert Spec.parse("router/random:seed=4").policy(9) == closecall.policy(
        "router", budget=9, trigger="random", seed=4
    )
    assert Spec.parse("router:trigger=per-cell").policy(9) == closecall.policy("router", budget=9, trigger="per-cell")
    assert Spec.parse("dense").policy(0) == closecall.policy("dense")
    assert [Spec.parse(name).policy(33) for name in DEFAULT] == [closecall.policy(name, budget=33) for name in DEFAULT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routr", "unknown policy 'routr': did you mean 'router'?"),
        ("router/matcht", "unknown control of 'router' 'matcht': did you mean 'matched'?"),
        ("topk/random", "only a router has controls"),
        ("router:qq=0.3", "unknown override in 'router:qq=0.3' 'qq'"),
        ("router:q", "an override is written key=value, got 'q'"),
        ("router:budget=4", "budgets are given for all policies alike"),
        ("router/last:trigger=random", "/last is the trigger already"),
        ("router:q=2", r"q must be in \[0, 1\]"),
    ],
)
def test_wrong_specs(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec.parse(text)


def test_lists_keep_options_together() -> None:
    given = "dense, router:q=0.3,rho=2,topk,a:path=x:y,dense"
    assert split(given) == ["dense", "router:q=0.3,rho=2", "topk", "a:path=x:y"]


def test_every_router_gets_its_controls() -> None:
    found = with_controls([Spec.parse(t) for t in ("dense", "router:q=0.3", "quest", "router:trigger=per-cell")])
    assert [str(s) for s in found] == [
        "dense", "router:q=0.3", "router/random:q=0.3", "router/last:q=0.3", "router/matched:q=0.3", "quest",
        "router:trigger=per-cell", "router/matched:trigger=per-cell",
    ]  # fmt: skip


def test_dense_runs_once_and_routers_before_their_matched_controls() -> None:
    panel = Panel(**PLAIN | {"specs": (Spec("router", "matched"), Spec("dense"), Spec("topk")), "budgets": (8, 16)})
    assert [(str(s), b) for s, b in panel.variants] == [
        ("dense", 0), ("topk", 8), ("topk", 16), ("router", 8), ("router", 16), ("router/matched", 8),
        ("router/matched", 16),
    ]  # fmt: skip


def test_work_goes_example_by_example() -> None:
    panel = Panel(**PLAIN | {"contexts": (1024, 2048), "tasks": ("a", "b"), "n": 3})
    assert [(j.number, j.context, j.task) for j in panel.jobs()] == [
        (n, c, t) for n in range(3) for c in (1024, 2048) for t in ("a", "b")
    ]


def test_tasks_of_lm_eval_have_no_contexts() -> None:
    panel = Panel(**PLAIN | {"contexts": (1024, 2048), "tasks": ("lm-eval:x", "a"), "n": 2})
    assert panel.places == [("a", 1024), ("a", 2048), ("lm-eval:x", 0)]
    listed = [(job.number, job.task, job.context) for job in panel.jobs()]
    assert listed == [(n, *place) for n in range(2) for place in panel.places]


def test_a_budget_that_decides_nothing_is_noted() -> None:
    panel = Panel(**PLAIN | {"budgets": (2, 8)})
    assert len(panel.notes) == 1
    assert "tile budget 4 can leave one free block" in panel.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ()}, "models is empty"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"contexts": (0,)}, "a context is a number of tokens"),
        ({"budgets": (1,)}, "router at budget 1 keeps 2 blocks a tile, not more than the 3 it can be forced to keep"),
    ],
)
def test_wrong_panels(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Panel(**PLAIN), **change)
