"""What a grid is made of, and what its names mean."""

from __future__ import annotations

import dataclasses
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import closecall
from closecall.rules.certified import Certified
from closecall.rules.router import Router
from closecall.triggers.calibrated import Calibrated
from closecall_lab.eval import runner, summary
from closecall_lab.eval.grid import Grid
from closecall_lab.eval.spec import DEFAULT, Spec, split, with_controls
from closecall_lab.eval.store import Store
from closecall_lab.report.gather import gather

pytestmark = pytest.mark.usefixtures("fewer_draws")

PLAIN: dict[str, Any] = {
    "models": ("m",),
    "tasks": ("niah-single",),
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
    assert Spec.parse("topk:tile_factor=2.75").policy(4).rule.tile_budget == 11  # whole here, if not at most budgets
    assert Spec.parse("dense").policy(0) == closecall.policy("dense")
    assert [Spec.parse(name).policy(33) for name in DEFAULT] == [closecall.policy(name) for name in DEFAULT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routr", "unknown policy 'routr': did you mean 'router'?"),
        ("router/matcht", "unknown control of 'router' 'matcht': did you mean 'matched'?"),
        ("topk/random", "only a router has controls"),
        ("router:qq=0.3", "unknown policy override 'qq'"),
        ("router:q", "an override is written key=value, got 'q'"),
        ("router:budget=4", "budgets are given for all policies alike"),
        ("router/last:trigger=random", "/last is the trigger already"),
        ("router:q=2", r"q must be in \[0, 1\]"),
        ("topk:tile_factor=0.00001", "tile_factor"),
        ("topk:tile_factor=none", "tile_factor"),
    ],
)
def test_wrong_specs(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec.parse(text)


def test_lists_keep_options_together() -> None:
    given = "dense, router:q=0.3,rho=2,topk,a:path=x:y,dense"
    assert split(given) == ["dense", "router:q=0.3,rho=2", "topk", "a:path=x:y"]


def test_scorers_on_the_command_line() -> None:
    texts = split("topk:scorer=box,c=0.5,aggregate=mass,quest,router:scorer=outliers,m=3,q=0.2")
    assert texts == ["topk:scorer=box,c=0.5,aggregate=mass", "quest", "router:scorer=outliers,m=3,q=0.2"]
    specs = [Spec.parse(text) for text in texts]
    assert [s.policy(8).name for s in specs] == ["topk-on-box", "quest", "router-on-outliers"]
    assert specs[0].policy(8) == closecall.policy("topk", scorer="box", c=0.5, aggregate="mass", budget=8)
    assert all(Spec.parse(str(s)) == s for s in specs)
    with pytest.raises(
        ValueError, match=r"c= has no effect on rule 'topk' on scorer 'mean': it belongs to scorer 'box'"
    ):
        Spec.parse("topk:c=0.5")
    with pytest.raises(ValueError, match=r"unknown scorer 'bax': did you mean 'box'"):
        Spec.parse("topk:scorer=bax")


def test_every_router_gets_its_controls() -> None:
    found = with_controls([Spec.parse(t) for t in ("dense", "router:q=0.3", "quest", "router:trigger=per-cell")])
    assert [str(s) for s in found] == [
        "dense", "router:q=0.3", "router/random:q=0.3", "router/last:q=0.3", "router/matched:q=0.3", "quest",
        "router:trigger=per-cell", "router/matched:trigger=per-cell",
    ]  # fmt: skip


def test_dense_runs_once_and_routers_before_their_matched_controls() -> None:
    grid = Grid(**PLAIN | {"specs": (Spec("router", "matched"), Spec("dense"), Spec("topk")), "budgets": (8, 16)})
    assert [(str(s), b) for s, b in grid.variants] == [
        ("dense", 0), ("topk", 8), ("topk", 16), ("router", 8), ("router", 16), ("router/matched", 8),
        ("router/matched", 16),
    ]  # fmt: skip


def test_work_goes_example_by_example() -> None:
    grid = Grid(**PLAIN | {"contexts": (1024, 2048), "tasks": ("niah-single", "probe-needle"), "n": 3})
    assert [(j.number, j.context, j.task) for j in grid.jobs()] == [
        (n, c, t) for n in range(3) for c in (1024, 2048) for t in ("niah-single", "probe-needle")
    ]


@pytest.mark.usefixtures("any_lm_eval_task")
def test_tasks_of_lm_eval_have_no_contexts() -> None:
    grid = Grid(**PLAIN | {"contexts": (1024, 2048), "tasks": ("lm-eval:arc_easy", "niah-single"), "n": 2})
    assert grid.places == [("niah-single", 1024), ("niah-single", 2048), ("lm-eval:arc_easy", 0)]
    listed = [(job.number, job.task, job.context) for job in grid.jobs()]
    assert listed == [(n, *place) for n in range(2) for place in grid.places]


def test_a_budget_that_decides_nothing_is_noted() -> None:
    grid = Grid(**PLAIN | {"budgets": (2, 8)})
    assert len(grid.notes) == 1
    assert "tile budget 4 can leave one free block" in grid.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ()}, "models is empty"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"contexts": (0,)}, "a context is a number of tokens"),
        ({"specs": (Spec("auto"),), "budgets": (1,)}, "auto at budget 1 keeps 2 blocks a tile, not more than the 3"),
        ({"specs": (Spec.parse("topk:tile_factor=2.75"),), "budgets": (4, 6)}, r"got 2.75 \* 6 = 16.5"),
        ({"budgets": (1,)}, "router at budget 1 keeps 2 blocks a tile, not more than the 3 it can be forced to keep"),
    ],
)
def test_wrong_grids(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Grid(**PLAIN), **change)


# -- policies from files -----------------------------------------------------------------------------------------------


def saved(path: Path, made: closecall.Policy) -> str:
    path.write_text(made.to_json())
    return f"file:{path}"


def calibrated(**overrides: Any) -> closecall.Policy:
    """A router with a threshold for each of the tiny model's two layers."""
    made = closecall.policy("router-on-quest", **({"budget": 7} | overrides))
    assert isinstance(made.rule, Router)
    return made.replace(rule=dataclasses.replace(made.rule, trigger=Calibrated((0.05, 0.1))))


def test_a_policy_from_a_file(tmp_path: Path) -> None:
    """All of it, but for the budget, which is the grid's."""
    made = calibrated(tile_factor=1, rho=3)
    spec = Spec.parse(saved(tmp_path / "my policy,1.json", made))
    assert spec.policy(9) == made.replace(rule=dataclasses.replace(made.rule, budget=9))  # type: ignore[call-arg]
    assert spec.policy(9, number=3) == spec.policy(9)
    assert (spec.scorer, spec.router, spec.triggers, spec.has_budget) == ("quest", True, True, True)
    assert spec.tile_budget(9) == 9
    assert str(spec).startswith("router-on-quest:saved=my-policy-1-")
    assert str(spec).endswith(",tile_factor=1")
    sent = pickle.loads(pickle.dumps(spec))  # as workers get it: the file is not read again
    (tmp_path / "my policy,1.json").unlink()
    assert sent.policy(9) == spec.policy(9)


def test_its_name_says_which_one_it_was(tmp_path: Path) -> None:
    """The same wherever the file lies, another if anything in it is another; overrides of the scorer stay visible."""
    one = calibrated()
    (tmp_path / "there").mkdir()
    names = [str(Spec.parse(saved(tmp_path / where / "a.json", one))) for where in ("", "there")]
    assert names[0] == names[1]
    other = str(Spec.parse(saved(tmp_path / "a.json", calibrated(rho=3))))
    assert other != names[0]
    assert other.partition("-")[0] == names[0].partition("-")[0]
    box = closecall.policy("router-on-box", c=0.25, aggregate="mass", block=32)
    assert str(Spec.parse(saved(tmp_path / "a.json", box))).startswith(
        "router-on-box:aggregate=mass,block=32,c=0.25,saved=a-"
    )


def test_the_name_alone_is_read_but_makes_no_policy(tmp_path: Path) -> None:
    spec = Spec.parse(saved(tmp_path / "a.json", calibrated(tile_factor=1)))
    again = Spec.parse(str(spec))
    assert again == spec
    assert (str(again), again.scorer, again.router, again.has_budget) == (str(spec), "quest", True, True)
    assert again.tile_budget(9) == 9
    assert again.notes(2) == []
    with pytest.raises(ValueError, match="is the name of a policy from a file: give the file itself, as file:PATH"):
        Grid(**PLAIN | {"specs": (again,)})


def test_a_rule_inside_a_rule_gets_the_budget_too(tmp_path: Path) -> None:
    made = closecall.policy("last-tile-on-quest", budget=7, factor=3)
    spec = Spec.parse(saved(tmp_path / "a.json", made))
    assert spec.has_budget
    assert spec.policy(9) == closecall.policy("last-tile-on-quest", budget=9, factor=3)


def test_without_a_budget_in_its_rule_it_runs_once(tmp_path: Path) -> None:
    made = closecall.policy("quest").replace(rule=Certified(eps=0.2, max_budget=12))
    spec = Spec.parse(saved(tmp_path / "a.json", made))
    grid = Grid(**PLAIN | {"specs": (spec, Spec("topk")), "budgets": (8, 16)})
    assert [(str(s), b) for s, b in grid.variants] == [(str(spec), 0), ("topk", 8), ("topk", 16)]
    assert spec.policy(0) == made
    assert Spec.parse(str(spec)).tile_budget(8) is None


def test_controls_of_a_policy_from_a_file(tmp_path: Path) -> None:
    """Thresholds trigger as many tiles as they trigger, so that only the budget can be matched."""
    fixed = Spec.parse(saved(tmp_path / "fixed.json", calibrated()))
    shares = Spec.parse(saved(tmp_path / "shares.json", closecall.policy("router", q=0.3, rho=3)))
    options = str(fixed).partition(":")[2]
    assert [str(s) for s in with_controls([fixed])] == [str(fixed), f"router-on-quest/matched:{options}"]
    assert [s.control for s in with_controls([shares])] == ["", "random", "last", "matched"]
    random = Spec.parse(f"file:{tmp_path / 'shares.json'}/random")
    assert random.policy(9, number=4) == closecall.policy("router", budget=9, q=0.3, rho=3, trigger="random", seed=4)
    assert Spec.parse(f"file:{tmp_path / 'shares.json'}/last").base == shares
    matched = Spec.parse(f"file:{tmp_path / 'fixed.json'}/matched")
    assert matched.policy(9) == fixed.policy(9)  # what matches it is known once it ran
    assert matched.base == fixed


def test_a_budget_that_decides_nothing_is_noted_of_a_file_too(tmp_path: Path) -> None:
    spec = Spec.parse(saved(tmp_path / "a.json", closecall.policy("router")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = Grid(**PLAIN | {"specs": (spec,), "budgets": (2, 8)})
    assert len(grid.notes) == 1
    assert "tile budget 4 can leave one free block" in grid.notes[0]


BAD_FILES = {
    "{": "is no policy as Policy.save writes it: .* Expecting property name",
    "[1]": "closecall_policy is None",
    '{"closecall_policy": 1}': "a rule is written as an object",
    '{"closecall_policy": 1, "rule": {"name": "topk", "budgt": 3}}': "did you mean 'budget'",
    '{"closecall_policy": 1, "scorer": {"name": "mean"}, "rule": {"name": "router", "trigger": 3}}': "be a Trigger",
    "\xff": "is no policy as",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_files_that_are_no_policies(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=BAD_FILES[text]):
        Spec.parse(f"file:{path}")


def test_a_multiple_of_a_tuned_policy_has_its_name_and_its_own_blocks() -> None:
    once, twice = Spec.parse("tuned:smollm2"), Spec.parse("tuned:smollm2:times=2")
    assert str(twice) == f"{once},times=2"
    assert twice.policy(8) == closecall.policy("tuned:smollm2:times=2") != once.policy(8)
    assert not twice.has_budget
    assert once.title == "tuned:smollm2"
    assert Spec.parse(str(twice)).title == twice.title == "tuned:smollm2:times=2"  # also read back from a store
    assert twice.family == once.family == once
    older = re.sub("saved=[^,]+", "saved=smollm2-00000000", str(once))
    assert Spec.parse(older).title == older  # other budgets than those that we ship now


def test_files_that_are_not_there(tmp_path: Path) -> None:
    saved(tmp_path / "a.json", calibrated())
    saved(tmp_path / "topk.json", closecall.policy("topk"))
    for given, message in (
        ("", "file: needs the path of a saved policy"),
        (f"{tmp_path}/b.json", "no policy file '.*b.json'"),
        (f"{tmp_path}/b.json/matched", "no policy file '.*b.json'"),
        (f"{tmp_path}", "no policy file"),
        (f"{tmp_path}/a.json/matcht", "unknown control of '.*a.json' 'matcht': did you mean 'matched'?"),
        (f"{tmp_path}/a.json/last", "this one's trigger is 'calibrated': its control is /matched"),
        (f"{tmp_path}/topk.json/matched", "only a router has controls, topk has no tiles to trigger"),
    ):
        with pytest.raises(ValueError, match=message):
            Spec.parse(f"file:{given}")


def test_a_grid_with_a_file(tiny: Path, tmp_path: Path) -> None:
    """It runs, its control follows it, and the report knows it after the file has gone."""
    given = saved(tmp_path / "fitted.json", calibrated(tile_factor=1))
    specs = with_controls([Spec.parse(t) for t in ("dense", "quest:tile_factor=1", given)])
    grid = Grid(
        models=(str(tiny),), tasks=("probe-needle",), contexts=(1000,), specs=tuple(specs), budgets=(5,), n=2
    )  # fmt: skip
    with Store(tmp_path / "results.db") as store:
        runner.run(grid, store, say=lambda _: None)
        name, matched = str(specs[2]), str(specs[3])
        runs = {row.cell.policy: row.run for row in store.rows() if row.cell.number == 1}
        assert closecall.Policy.from_json(runs[name].policy) == calibrated(tile_factor=1, budget=5)
        assert runs[matched].effective_budget == pytest.approx(runs[name].effective_budget, abs=0.5 / 16)
        assert str(tmp_path) not in name
        (tmp_path / "fitted.json").unlink()
        (setting,) = gather(store).settings
        (group,) = summary.groups(store)
    found = {str(f.spec): f for f in setting.findings}
    assert found[name].budget_text == "5 (5 a tile)"
    assert found[matched].budget_text == "as much as 5 (5 a tile)"
    assert setting.test((name, 5), (matched, 5)) is not None
    assert len(summary.tables(group, "tiny")) >= 2
