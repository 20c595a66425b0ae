"""Policies as values: presets, overrides, equality, JSON, and a line that a person understands."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import closecall
from closecall import Policy, overrides, policy
from closecall.models import catalogue
from closecall.policy import accepted, as_policy
from closecall.presets import PRESETS
from closecall.rules.last_tile import LastTile
from closecall.rules.per_head import PerHead
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


EVERYTHING = {
    "budget": 10, "tile_factor": 1, "q": 0.1, "rho": 3, "block": 32, "tile": 128, "sinks": 0, "trigger": "last",
    "aggregate": "mean", "threshold": 0.1, "seed": 1, "pool": 4, "share": "group",
    "outlying": 1, "unpooled": 2,
}  # fmt: skip
GRID = {"block", "tile"}
TOPK = GRID | {"budget", "tile_factor", "sinks", "aggregate", "pool", "share", "outlying", "unpooled"}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("dense", GRID),
        ("topk", TOPK),
        ("quest", TOPK),
        ("router", TOPK | {"q", "rho", "trigger"}),
        ("router-on-quest", TOPK | {"q", "rho", "trigger"}),
        ("auto", TOPK),
    ],
)
def test_a_sweep_passes_on_what_a_policy_takes(name: str, taken: set[str]) -> None:
    passed = accepted(name, EVERYTHING)
    assert set(passed) == taken
    assert (policy(name, **passed).block, policy(name, **passed).tile) == (32, 128)
    for key in set(EVERYTHING) - taken:
        with pytest.raises(ValueError, match=rf"^{key}= has no effect on rule .*: it belongs to"):
            policy(name, **{key: EVERYTHING[key]})


@pytest.mark.parametrize(
    ("given", "pooling"),
    [
        ({}, (1, 0, 0)),
        ({"pool": 16}, (16, 4, 16)),
        ({"pool": 16, "outlying": 0}, (16, 0, 16)),
        ({"pool": 8, "unpooled": 2, "tile": 32, "block": 32}, (8, 4, 2)),
        ({"tile": 4, "block": 4, "pool": 2}, (2, 0, 0)),  # four outlying rows would be all that there are
    ],
    ids=str,
)
def test_outlying_rows_and_unpooled_tiles_come_with_the_pool_of_auto(given: dict, pooling: tuple) -> None:
    made = policy("auto", **given)
    assert (made.pool, made.outlying, made.unpooled) == pooling
    assert made.name == "auto"
    assert policy("quest", pool=16).outlying == 0


@pytest.mark.parametrize("key", ["outlying", "unpooled", "candidates"])
def test_what_needs_a_pool_is_refused_without_one(key: str) -> None:
    message = f"^{key}= has no effect on rule 'topk' on scorer 'quest': it belongs to every policy that pools rows"
    with pytest.raises(ValueError, match=message):
        policy("quest", pool=1, **{key: 1})
    assert accepted("quest", {key: 1}) == {}
    assert accepted("quest", {key: 1, "pool": 8}) == {key: 1, "pool": 8}
    pooled = policy("quest", pool=8, **{key: 1})
    assert pooled != policy("quest", pool=8)
    assert pooled.replace(pool=1) == policy("quest", pool=1)  # what changes nothing tells no policies apart


def test_what_a_trigger_takes_depends_on_the_trigger() -> None:
    assert set(accepted("router", EVERYTHING | {"trigger": "random"})) >= {"q", "seed"}
    assert set(accepted("router", EVERYTHING | {"trigger": "absolute"})) >= {"threshold"}
    with pytest.raises(
        ValueError, match=r"q= has no effect here: the policy is to keep .* for every cell with margin at most 0\.05"
    ):
        policy("router", trigger="absolute", q=0.3)
    assert accepted("last-tile-on-quest", {"rule": "router", "q": 0.3, "seed": 2}) == {"rule": "router", "q": 0.3}


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("topk", {"q": 0.3}, "q= has no effect on rule 'topk' on scorer 'mean': it belongs to rule 'router'"),
        ("quest", {"rho": 3}, "rho= has no effect on rule 'topk' on scorer 'quest': it belongs to rule 'router'"),
        ("router", {"threshold": 0.1}, "threshold= has no effect .*: it belongs to trigger 'absolute'"),
        ("auto", {"q": 0.2}, "q= has no effect on rule 'last-tile' on scorer 'outliers': it belongs to rule 'router'"),
        ("dense", {"sinks": 2}, "sinks= has no effect on rule 'dense': it belongs to every policy with a scorer"),
        ("dense", {"budget": 2}, "budget= has no effect on rule 'dense': it belongs to rule .*'topk'"),
    ],
)
def test_an_override_without_effect_names_who_takes_it(name: str, override: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(name, **override)


def test_a_typo_lists_near_names_and_what_this_policy_takes() -> None:
    with pytest.raises(ValueError, match="bugdet") as error:
        policy("topk", bugdet=3)
    assert str(error.value) == (
        "unknown policy override 'bugdet': did you mean 'budget'? "
        "topk takes aggregate, block, budget, pool, scorer, share, sinks, tile, tile_factor"
    )


def test_overrides_reach_a_part_that_is_an_instance() -> None:
    topk, random = closecall.RULES["topk"](budget=4), closecall.TRIGGERS["random"](seed=2)
    router = closecall.RULES["router"](budget=4, trigger=random)
    seven = policy("last-tile-on-quest", budget=7, factor=3)
    assert policy("last-tile-on-quest", rule=topk, budget=7, factor=3) == seven
    assert policy("router", trigger=random, seed=7) == policy("router", trigger="random", seed=7)
    inner = policy("last-tile-on-quest", rule=router, q=0.2, seed=7).rule.rule
    assert inner == closecall.RULES["router"](budget=4, q=0.2, trigger=closecall.TRIGGERS["random"](seed=7))
    assert policy("router-on-quest", scorer=closecall.SCORERS["box"](c=0.2), c=0.7).scorer.c == 0.7


@pytest.mark.parametrize(
    ("name", "overrules", "idle"),
    [
        ("last-tile-on-mean", {"pay": False}, {"give": 0.1}),
        ("top-p-on-mean", {"p": 0.5}, {"among": "tile"}),
        ("max-ratio-on-mean", {"ratio": 0.5}, {"among": "tile"}),
    ],
)
def test_an_override_that_another_one_overrules(name: str, overrules: dict[str, Any], idle: dict[str, Any]) -> None:
    policy(name, **idle)
    with pytest.raises(ValueError, match=rf"{next(iter(idle))}= has no effect here: the policy is to"):
        policy(name, **overrules, **idle)


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


# --- Files and text --------------------------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    made = policy("router-on-quest", budget=12, trigger="random", seed=3)
    for path in (tmp_path / "a.json", str(tmp_path / "b")):
        made.save(path)
        assert Policy.load(path) == made
        policy("dense").save(path)  # another one takes its place
        assert Policy.load(path) == policy("dense")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.json", "b"]
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o666 & ~_umask()


@pytest.mark.parametrize("measured", [3, "fast", [1]])
def test_what_was_measured_must_be_a_mapping(tmp_path: Path, measured: Any) -> None:
    with pytest.raises(TypeError, match="measured must be a mapping that JSON can hold, or None, got"):
        policy("dense").save(tmp_path / "a.json", measured=measured)
    assert not list(tmp_path.iterdir())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    policy("topk").save(path)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        policy("quest").save(path)
    assert Policy.load(path) == policy("topk")
    assert [x.name for x in tmp_path.iterdir()] == ["a.json"]


def test_files_that_are_not_there_or_no_policies(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no policy file '.*none.json': Policy.save\(path\) writes one"):
        Policy.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="no policy file"):
        Policy.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*nowhere'"):
        policy("topk").save(tmp_path / "nowhere" / "a.json")
    with pytest.raises(IsADirectoryError, match="that is a folder"):
        policy("topk").save(tmp_path)
    for text, message in (
        ("topk", "is no policy as Policy.save writes it: not a policy's JSON text"),
        ('{"closecall_policy": 99}', "version 1: closecall_policy is 99"),
        ('{"closecall_policy": 1, "rule": {"name": "topk", "budgt": 3}}', "did you mean 'budget'"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            Policy.load(tmp_path / "bad.json")
        assert "bad.json" in str(error.value)


def test_from_json_refuses_paths() -> None:
    for path in ("out/policy.json", Path("policy.json")):
        with pytest.raises(TypeError, match=r"got the path '.*policy.json': use Policy.load\(path\)"):
            Policy.from_json(path)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("auto", policy("auto")),
        ("auto:budget=8", policy("auto", budget=8)),
        (" auto:budget=8 ", policy("auto", budget=8)),
        ("auto:", policy("auto")),
        ("topk-on-box:c=0.25,budget=4", policy("topk-on-box", c=0.25, budget=4)),
        ("topk:scorer=box, c=1, aggregate=mass", policy("topk", scorer="box", c=1, aggregate="mass")),
        ("router:trigger=per-cell,q=1e-1,rho=+3", policy("router", trigger="per-cell", q=0.1, rho=3)),
        ("last-tile-on-quest:pay=false,factor=dense", policy("last-tile-on-quest", pay=False, factor="dense")),
        ("last-tile-on-quest:pay=True,rule=router,q=.5", policy("last-tile-on-quest", pay=True, rule="router", q=0.5)),
        ("router:trigger=calibrated,thresholds=0.1;0.2", policy("router", trigger="calibrated", thresholds=(0.1, 0.2))),
        ("router:trigger=calibrated,thresholds=1;", policy("router", trigger="calibrated", thresholds=(1,))),
        ("top-p-on-mean:p=none", policy("top-p-on-mean", p=None)),
    ],
)
def test_text_for_a_policy(text: str, made: Policy) -> None:
    assert as_policy(text) == made
    assert as_policy(made) is made
    if text == text.strip():
        assert policy(text) == made


def test_a_whole_policy_takes_no_more_overrides() -> None:
    with pytest.raises(ValueError, match=r"'auto:budget=8' is a whole policy already: write tile into it"):
        policy("auto:budget=8", tile=32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto:budget", "'auto:budget': an override is written key=value, got 'budget'"),
        ("auto:=8", "an override is written key=value, got '=8'"),
        ("auto:budget=", "'budget=' has no value: write budget=VALUE"),
        ("auto:budget=8,budget=9", "budget is set twice, to '8' and to '9'"),
        ("auto:budget=8 9", "'auto:budget=8 9': budget: '8 9' is neither a number"),
        ("auto:budget=[8]", r"budget: '\[8\]' is neither a number"),
        ("auto:budget=8.5", "budget must be a whole number of blocks, at least 1, got 8.5"),
        ("auto:budget=eight", "budget must be a whole number of blocks, at least 1, got 'eight'"),
        ("auto:budget=true", "got True"),
        ("last-tile-on-quest:pay=1", "pay must be True or False, got 1"),
        ("autoo:budget=8", "unknown policy 'autoo': did you mean 'auto'"),
        ("auto:bugdet=8", "did you mean 'budget'"),
        ("topk:q=0.3", "q= has no effect"),
        ("file:", "file: needs the path of a saved policy"),
        ("tuned:gpt-2", r"no policy was tuned to 'gpt-2': .*`closecall tune --model gpt-2` makes one"),
        ("", "unknown policy ''"),
    ],
)
def test_wrong_text_for_a_policy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_policy(text)


def test_tuned_policies_that_ship_fit_the_models_they_are_named_after() -> None:
    shipped = sorted(path.stem for path in (Path(closecall.__file__).parent / "tuned").glob("*.json"))
    assert shipped == ["qwen2.5-coder-1.5b", "smollm2"]
    for name in shipped:
        entry, rule = catalogue.get(name), as_policy(f"tuned:{name}").rule
        assert isinstance(rule, LastTile)
        assert isinstance(rule.rule, PerHead)
        assert rule.rule.head_dim == entry.head_dim
        assert len(rule.rule.budgets) == entry.full_layers
        assert {len(listed) for listed in rule.rule.budgets} == {entry.q_heads}


def test_a_tuned_policy_at_another_length_keeps_the_share_of_each_head() -> None:
    at_4k, at_8k = as_policy("tuned:smollm2"), as_policy("tuned:smollm2:times=2")
    assert at_8k == at_4k.times(2) == policy("tuned:smollm2:times=2")
    assert at_8k.replace(rule=at_4k.rule) == at_4k
    assert isinstance(at_4k.rule, LastTile)
    assert isinstance(at_8k.rule, LastTile)
    assert isinstance(at_4k.rule.rule, PerHead)
    assert isinstance(at_8k.rule.rule, PerHead)
    assert at_8k.rule.rule.budgets == tuple(tuple(2 * b for b in listed) for listed in at_4k.rule.rule.budgets)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tuned:smollm2:times=two", "'tuned:smollm2:times=two': times must be a number, such as 2, got 'two'"),
        ("tuned:smollm2:times=", "'times=' has no value: write times=VALUE"),
        ("tuned:smollm2:times=0", "times must be a number above 0 and at most .*, got 0"),
        ("tuned:smollm2:times=-1", "got -1"),
        ("tuned:smollm2:budget=8", "a tuned policy takes only times=, as in tuned:smollm2:times=2, got 'budget=8'"),
        ("tuned:smollm2:times=2:budget=8", "times: '2:budget=8' is neither a number"),
        ("tuned:smollm2:times=2,budget=8", "a saved policy takes only times=, got budget="),
        ("file:plain.json:times=2,bogus=1", "a saved policy takes only times=, got bogus="),
        ("file:plain.json:times=2", "times= multiplies budgets by head, .*and this policy has none: keep 14 blocks"),
    ],
)
def test_wrong_multiples_of_a_tuned_policy(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy("quest", budget=7).save("plain.json")
    with pytest.raises(ValueError, match=message):
        as_policy(text)


def test_saved_files_as_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy("quest", budget=7)
    monkeypatch.chdir(tmp_path)
    for name in ("policy.json", "plain"):
        made.save(name)
    for value in ("policy.json", "file:policy.json", "file:plain", str(tmp_path / "policy.json"), Path("plain")):
        assert as_policy(value) == made
    q = torch.randn(1, 1, 100, 16)
    assert closecall.select(q, q, "policy.json").kv_idx.shape == (1, 1, 2, 2)
    with pytest.raises(FileNotFoundError, match=r"no policy file 'polcy\.json'"):
        as_policy("polcy.json")


@given(
    st.recursive(
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
        | st.from_regex(r"[a-z][a-z_.-]{0,8}", fullmatch=True).filter(lambda w: w not in ("true", "false", "none")),
        lambda inner: st.lists(inner.filter(lambda x: not isinstance(x, tuple)), min_size=1, max_size=3).map(tuple),
        max_leaves=4,
    ).filter(lambda x: not isinstance(x, tuple) or all(not isinstance(y, tuple) for y in x))
)  # fmt: skip
def test_values_are_read_as_they_were_written(value: Any) -> None:
    again = overrides.read(f"key={overrides.write(value)}")["key"]
    assert again == value
    assert type(again) is type(value)


# --- Parts that cannot be in a policy --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Unregistered(closecall.Scorer):
    def summarise(self, keys: Any, block: int) -> Any:
        return closecall.SCORERS["mean"]().summarise(keys, block)


@dataclasses.dataclass(frozen=True)
class Wider(closecall.RULES["topk"]):  # type: ignore[misc]
    """Inherits a registered name, which is not its own."""


@dataclasses.dataclass(frozen=True)
class Never(closecall.Trigger):
    pass


def test_unregistered_parts_are_named() -> None:
    topk, mean = closecall.RULES["topk"](), closecall.SCORERS["mean"]()
    for make, kind, name in (
        (lambda: Policy(Unregistered(), topk), "scorer", "Unregistered"),
        (lambda: policy("topk", scorer=Unregistered()), "scorer", "Unregistered"),
        (lambda: Policy(mean, Wider()), "rule", "Wider"),
        (lambda: policy("router", trigger=Never()), "trigger", "Never"),
        (lambda: policy("last-tile-on-mean", rule=Wider()), "rule", "Wider"),
    ):
        with pytest.raises(TypeError, match=rf"^{kind} {name} is not registered: put @closecall.{kind.upper()}S.reg"):
            make()


def test_a_rule_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"rule must be a Rule, such as closecall.RULES\['topk'\]\(.*\), got 'topk'"):
        Policy(closecall.SCORERS["mean"](), "topk")
