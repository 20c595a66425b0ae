"""Any scorer under any rule, by name: on tensors, in JSON, on the command line; and what bad numbers get."""

from __future__ import annotations

import warnings

import pytest
import torch

import closecall
from closecall import RULES, SCORERS, Policy, policy
from closecall.policy import accepted

OURS = sorted(n for n in SCORERS.names() if SCORERS[n].__module__.startswith("closecall."))
RANKING = sorted(n for n in RULES.names() if RULES[n].__module__.startswith("closecall.") and RULES[n].needs_scores)
GRID = {"block": 8, "tile": 16}
GIVEN = {
    "box": {"c": 0.25}, "outliers": {"m": 2}, "snapkv": {"window": 16}, "minference": {"window": 16},
    "moba": {"gates": 3}, "nsa": {"parts": 2}, "xattention": {"stride": 4},
}  # fmt: skip
RULE = {"even": {"keep": 6.5}, "certified": {"max_budget": 7}, "per-head": {"budgets": ((7, 6, 5, 4),)}}


def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(2, h, 140, 16, generator=generator) for h in (4, 2, 2))


@pytest.mark.parametrize("rule", RANKING)
@pytest.mark.parametrize("scorer", OURS)
def test_every_scorer_under_every_rule(scorer: str, rule: str) -> None:
    q, k, v = tensors()
    padding = torch.arange(140) >= torch.tensor([[0], [37]])
    for aggregate in ("max", "mass"):
        given = {"budget": 6, "tile_factor": 1} | GRID | GIVEN.get(scorer, {}) | RULE.get(rule, {})
        made = policy(f"{rule}-on-{scorer}", aggregate=aggregate, **accepted(f"{rule}-on-{scorer}", given))
        selection = closecall.select(q, k, made, key_padding=padding)
        selection.check()
        kept = torch.zeros(2, 4, 9, 19, dtype=torch.bool).scatter_(3, selection.kv_idx.long(), True)[..., :18]
        forced = selection.geometry.forced_mask(1)[:, None]
        assert bool((kept | ~forced).all())
        assert int(selection.counts.max()) <= made.rule.limit(18)
        assert int(selection.counts.sum()) < 4 * int(selection.geometry.visible.sum())  # something was cut
        out = closecall.attention(q, k, v, made, key_padding=padding)
        assert torch.equal(out, closecall.attend(q, k, v, selection))


@pytest.mark.parametrize("scorer", OURS)
def test_names_json_and_lines(scorer: str) -> None:
    made = policy("topk", scorer=scorer, aggregate="mass-max", **GIVEN.get(scorer, {}), **GRID)
    assert made == policy(f"topk-on-{scorer}", aggregate="mass-max", **GIVEN.get(scorer, {}), **GRID)
    assert made == policy("quest", scorer=made.scorer, aggregate="mass-max", **GRID)
    assert policy(made.name).name == made.name
    again = Policy.from_json(made.to_json())
    assert again == made
    assert hash(again) == hash(made)
    line = str(made)
    assert f"{scorer} scores" in line
    assert "mass-max" in line
    assert all(f"{key} {value}" in line for key, value in GIVEN.get(scorer, {}).items())
    assert made.scorer.vectors_per_block is None or 1 <= made.scorer.vectors_per_block < 8


def test_names_of_compositions() -> None:
    assert policy("topk", scorer="box").name == "topk-on-box"
    assert policy("router", scorer="quest").name == "router-on-quest"
    assert policy("router-on-quest", scorer="outliers", m=2).name == "router-on-outliers"
    assert policy("topk-on-mean") == policy("topk")
    assert policy("topk-on-quest") == policy("quest")
    assert policy("topk", scorer=SCORERS["box"](c=0.75), c=0.25).scorer.c == 0.25


@pytest.mark.parametrize(
    ("name", "overrides", "fragments"),
    [
        ("topk", {"scorer": "outlier"}, ["unknown scorer 'outlier'", "did you mean 'outliers'"]),
        ("topk", {"scorer": 3}, ["scorer must be a Scorer", "box", "3"]),
        ("dense", {"scorer": "box"}, ["'dense'", "no scorer"]),
        ("topk", {"m": 3}, ["m= has no effect", "'mean'", "'outliers'"]),
        ("topk", {"scorer": "quest", "c": 0.5}, ["c= has no effect", "'quest'", "'box'"]),
        ("auto", {"window": 5}, ["window= has no effect", "'outliers'", "'snapkv'"]),
        ("topk", {"scorer": "outliers", "c": 2}, ["c must be in [0, 1]", "2"]),
        ("topk", {"keep": 3.0}, ["keep= has no effect", "rule 'even'"]),
        ("topk-on-bax", {}, ["unknown policy 'topk-on-bax'", "did you mean 'topk-on-box'", "RULE-on-SCORER"]),
        ("topq-on-box", {}, ["did you mean 'topk-on-box'"]),
        ("topk", {"scorer": "box", "c": 1.5}, ["c", "[0, 1]", "1.5"]),
        ("topk", {"scorer": "box", "c": float("nan")}, ["c", "nan"]),
        ("topk", {"scorer": "box", "c": True}, ["c", "True"]),
        ("topk", {"scorer": "box", "c": "half"}, ["c", "'half'"]),
        ("topk", {"scorer": "outliers", "m": -1}, ["m", "at least 0", "-1"]),
        ("topk", {"scorer": "outliers", "m": 2.0}, ["m", "whole number", "2.0"]),
        ("topk", {"scorer": "outliers", "m": 65}, ["m = 65", "blocks of 64 keys", "smaller m"]),
        ("topk", {"scorer": "outliers", "m": 63}, ["store 64 vectors", "block of 64 keys", "larger blocks"]),
        ("topk", {"scorer": "outliers", "m": 7, "block": 8}, ["store 8 vectors", "block of 8 keys"]),
        ("quest", {"block": 2}, ["'quest'", "store 2 vectors", "block of 2 keys"]),
        ("topk", {"scorer": "nsa", "block": 4}, ["'nsa'", "store 4 vectors"]),
        ("topk", {"scorer": "nsa", "parts": 5}, ["parts = 5", "divide", "64"]),
        ("topk", {"scorer": "nsa", "parts": 0}, ["parts", "at least 1", "0"]),
        ("topk", {"scorer": "xattention", "stride": 6}, ["stride = 6", "block of 64"]),
        ("topk", {"scorer": "xattention", "stride": 8, "tile": 12}, ["stride = 8", "tile of 12"]),
        ("topk", {"scorer": "snapkv", "window": 0}, ["window", "at least 1", "0"]),
        ("topk", {"scorer": "minference", "window": "x"}, ["window", "'x'"]),
        ("topk", {"scorer": "moba", "gates": 0}, ["gates", "at least 1", "0"]),
        ("topk", {"aggregate": "mas"}, ["aggregate", "did you mean 'mass'", "mass-max"]),
    ],
)
def test_bad_names_and_numbers(name: str, overrides: dict, fragments: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        policy(name, **overrides)
    assert all(f in str(error.value) for f in fragments), str(error.value)


def test_a_scorer_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"scorer must be a Scorer or one of .*'box'|got 'box'"):
        Policy(scorer="box", rule=RULES["topk"]())


def test_a_key_that_is_a_block_of_its_own_may_have_any_summary() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy("quest", block=1).block == 1


def test_auto_is_a_composition_like_any_other() -> None:
    auto = policy("auto", budget=5)
    parts = {"m": 1, "c": 0.5, "aggregate": "softmax", "factor": "dense", "give": 0.3}
    assert auto == policy("last-tile-on-outliers", **parts, budget=5)
    assert auto.name == "auto"
    assert Policy.from_json(auto.to_json()) == auto
    for changed in ({"m": 2}, {"c": 0.25}, {"aggregate": "max"}, {"factor": 2, "give": 0.5}, {"give": 0.5}):
        other = policy("auto", **changed)
        assert other.name == "last-tile-on-outliers"
        assert (
            changed.items() <= (other.scorer.to_dict() | other.rule.to_dict() | {"aggregate": other.aggregate}).items()
        )
    assert policy("auto", tiles=2).name == "auto"
    swapped = policy("auto", scorer="quest")
    assert (swapped.name, swapped.aggregate) == ("last-tile-on-quest", "softmax")
    assert policy("router-on-outliers").name == "router-on-outliers"
