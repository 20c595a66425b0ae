"""Policies as values: presets, overrides, equality, JSON, and a line that a person understands."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings

import pytest

import closecall
from closecall import Policy, policy
from closecall.policy import PRESETS
from drawing import Case, cases, over


def test_the_paper_is_the_default() -> None:
    p = policy("router-on-quest")
    assert (p.block, p.tile, p.sinks, p.aggregate) == (64, 64, 1, "max")
    rule = p.rule
    assert (rule.budget, rule.tile_factor, rule.tile_budget) == (33, 2, 66)
    assert (rule.q, rule.rho, rule.expanded_budget, rule.trigger.name) == (0.40, 2, 132, "quantile")


@pytest.mark.parametrize(
    ("name", "scorer", "rule"),
    [
        ("dense", None, "dense"),
        ("topk", "mean", "topk"),
        ("quest", "quest", "topk"),
        ("router", "mean", "router"),
        ("router-on-quest", "quest", "router"),
    ],
)
def test_every_preset_is_a_composition(name: str, scorer: str | None, rule: str) -> None:
    p = policy(name)
    assert (p.scorer.name if p.scorer else None, p.rule.name, p.name) == (scorer, rule, name)
    composed = Policy(scorer=closecall.SCORERS[scorer]() if scorer else None, rule=closecall.RULES[rule]())
    assert composed == p


def test_overrides_arrive() -> None:
    p = policy(
        "router", budget=12, tile_factor=1.5, q=0.25, rho=3, block=32, tile=16, sinks=2, trigger="random", seed=7,
        aggregate="mean",
    )  # fmt: skip
    assert (p.rule.tile_budget, p.rule.expanded_budget, p.rule.q) == (18, 54, 0.25)
    assert (p.block, p.tile, p.sinks, p.aggregate) == (32, 16, 2, "mean")
    assert (p.rule.trigger.name, p.rule.trigger.seed) == ("random", 7)
    assert policy("router", trigger="absolute", threshold=0.2).rule.trigger.threshold == 0.2
    assert policy("router", trigger=closecall.TRIGGERS["last"]()) == policy("router", trigger="last")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_every_override(name: str) -> None:
    """One sweep can run over all presets."""
    overrides = {
        "budget": 10, "tile_factor": 1, "q": 0.1, "rho": 3, "block": 32, "tile": 128, "sinks": 0, "trigger": "last",
        "aggregate": "mean", "threshold": 0.1, "seed": 1,
    }  # fmt: skip
    p = policy(name, **overrides)
    assert (p.block, p.tile) == (32, 128)


def test_an_expanded_budget_never_exceeds_rho_times_the_budget() -> None:
    assert policy("router", budget=5, tile_factor=1, rho=1.5).rule.expanded_budget == 7
    assert policy("router", budget=10, tile_factor=1, rho=1.1).rule.expanded_budget == 11  # 1.1 * 10 > 11 in binary


def test_equal_by_value_hashable_and_immutable() -> None:
    p = policy("router", budget=20)
    assert p == policy("router", budget=20)
    assert hash(p) == hash(policy("router", budget=20))
    assert len({p, policy("router", budget=20), policy("router", budget=21), policy("router-on-quest", budget=20)}) == 3
    assert policy("topk") != policy("quest")
    assert policy("topk") != policy("topk", sinks=2)
    assert policy("router", trigger="random", seed=1) != policy("router", trigger="random", seed=2)
    for target, name in ((p, "block"), (p.rule, "budget"), (p.scorer, "name"), (p.rule.trigger, "seed")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, 1)
    assert copy.deepcopy(p) == pickle.loads(pickle.dumps(p)) == p
    assert p.replace(block=32).block == 32
    assert p.block == 64


@over(60, case=cases())
def test_json_round_trip(case: Case) -> None:
    p = case.policy()
    again = Policy.from_json(p.to_json())
    assert again == p
    assert hash(again) == hash(p)
    assert again.to_json() == p.to_json()
    assert json.loads(p.to_json())["block"] == case.block  # plain JSON, for other programs too


def test_json_names_what_it_does_not_know() -> None:
    good = json.loads(policy("router").to_json())
    for change, fragments in (
        ({"closecall_policy": 99}, ["99", "version"]),
        ({"blok": 1}, ["blok", "block"]),
        ({"rule": {"name": "ruter"}}, ["ruter", "router"]),
        ({"scorer": {"name": "meen"}}, ["meen", "mean"]),
        ({"rule": {"name": "topk", "bugdet": 3}}, ["bugdet", "budget"]),
        ({"rule": {"name": "router", "trigger": {"name": "lst"}}}, ["lst", "last"]),
        ({"rule": None}, ["rule"]),
    ):
        with pytest.raises(ValueError, match=fragments[0]) as error:
            Policy.from_json(json.dumps(good | change))
        assert all(f in str(error.value) for f in fragments)
    without = {key: value for key, value in good.items() if key != "rule"}
    for text in (json.dumps(without), "[]", "not json"):
        with pytest.raises(ValueError, match=r"."):
            Policy.from_json(text)


def test_one_line_that_a_person_understands() -> None:
    for name in PRESETS:
        line = str(policy(name))
        assert line.startswith(f"{name}: ")
        assert "\n" not in line
    line = str(policy("router-on-quest", budget=20, q=0.3))
    assert all(f in line for f in ("keep 40 blocks", "budget 20", "80 for", "30%", "quest scores", "64"))
    assert "random" in str(policy("router", trigger="random", seed=5))
    assert "0.05" in str(policy("router", trigger="absolute"))


@pytest.mark.parametrize(
    ("name", "overrides", "fragments"),
    [
        ("quets", {}, ["policy", "quets", "did you mean 'quest'"]),
        ("router-on-qest", {}, ["did you mean 'router-on-quest'"]),
        ("zzz", {}, ["known: auto, dense, quest, router, router-on-quest, topk"]),
        ("topk", {"bugdet": 3}, ["policy override", "bugdet", "did you mean 'budget'"]),
        ("router", {"trigger": "quantil"}, ["trigger", "quantil", "did you mean 'quantile'"]),
        ("topk", {"aggregate": "men"}, ["aggregate", "men", "did you mean 'mean'"]),
        ("router", {"q": 1.5}, ["q", "[0, 1]", "1.5"]),
        ("router", {"q": -0.1}, ["q", "[0, 1]", "-0.1"]),
        ("router", {"q": float("nan")}, ["q", "nan"]),
        ("router", {"q": "0.4"}, ["q", "'0.4'"]),
        ("router", {"q": True}, ["q", "True"]),
        ("router", {"rho": 0.9}, ["rho", "at least 1", "0.9"]),
        ("router", {"rho": float("inf")}, ["rho", "inf"]),
        ("router", {"rho": "2"}, ["rho", "'2'"]),
        ("topk", {"budget": 0}, ["budget", "at least 1", "0"]),
        ("topk", {"budget": 2.5}, ["budget", "whole number", "2.5"]),
        ("topk", {"budget": True}, ["budget", "True"]),
        ("topk", {"budget": 3, "tile_factor": 0.5}, ["tile_factor", "whole number", "1.5"]),
        ("topk", {"tile_factor": 0}, ["tile_factor", "at least 1"]),
        ("topk", {"tile_factor": float("nan")}, ["tile_factor", "nan"]),
        ("topk", {"tile_factor": "2"}, ["tile_factor", "'2'"]),
        ("topk", {"block": 0}, ["block", "at least 1", "0"]),
        ("topk", {"tile": 1.0}, ["tile", "whole number", "1.0"]),
        ("topk", {"sinks": -1}, ["sinks", "at least 0", "-1"]),
        ("router", {"trigger": "absolute", "threshold": 2}, ["threshold", "[0, 1]", "2"]),
        ("router", {"trigger": "absolute", "threshold": "x"}, ["threshold", "'x'"]),
        ("router", {"trigger": "random", "seed": -1}, ["seed", "-1"]),
        ("router", {"trigger": "random", "seed": 0.5}, ["seed", "0.5"]),
        ("router", {"trigger": 3}, ["trigger", "3", "quantile"]),
    ],
)
def test_bad_names_and_numbers(name: str, overrides: dict, fragments: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        policy(name, **overrides)
    assert all(f in str(error.value) for f in fragments), str(error.value)


def test_a_rule_that_ranks_needs_a_scorer() -> None:
    with pytest.raises(ValueError, match=r"'topk' needs a scorer: one of .*mean"):
        Policy(scorer=None, rule=closecall.RULES["topk"]())


def test_a_router_that_can_be_left_one_free_block_is_warned_of() -> None:
    """With c = 1 the margin is 1 everywhere. Off the block grid a tile of 64 rows overlaps two blocks: 3 forced."""
    with pytest.warns(UserWarning, match=r"tile budget 4 .* 3 forced .*larger budget"):
        policy("router", budget=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy("router", budget=5, tile_factor=1)
        policy("topk", budget=2)  # has no use for the margin
        policy("router", budget=2, sinks=0)


def test_registering_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean' is registered already: choose another name"):
        closecall.SCORERS.register("mean")(closecall.SCORERS["mean"])
