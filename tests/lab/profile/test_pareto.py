"""Accuracy joined with speed, on a store and a profile whose every number is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closecall_lab.bench.profile import pareto
from closecall_lab.bench.profile.parts import PARTS
from closecall_lab.bench.profile.policies import read
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.statistics import Estimate
from closecall_lab.eval.store import Cell, Run, Store

Command = Callable[..., int]
KIND = ("fp32", 1, "a machine")
POINT = pareto.Point("m", "t", 8192, KIND, "router", 8, Estimate(0.9, 0.8, 1.0, 10), 1.0, pareto.Wall(0.5, 0.6))


def answer(
    store: Store, policy: str, budget: int, right: int, of: int = 10, context: int = 8192, seed: int = 0
) -> None:
    """So many right answers, one to an example."""
    with store.transaction():
        for number in range(of):
            good = number < right
            spec = Spec.parse(policy)
            made = spec.policy(budget or 33)
            one = {"score": float(good), "correct": good, "output": "", "asked_triggered": 0.0}
            layers: dict[str, Any] = {"layer": [0], "hit": [None], "hit_union": [None]}
            layers |= {key: [None] for key in ("trigger_rate", "asked_triggered", "last_triggered")}
            named = (made.to_json(), float(good), int(good), 1, 16.0, 0.1, context, 1.0)
            run = Run("f" * 64, f"{context}/{seed}/{number}", *named, answers=[one], layers=layers, warnings=[])
            store.put(Cell("f" * 64, "niah-multikey", context, seed, number, str(spec), budget), run)


def profile(path: Path, walls: dict[str, float], *, model: str = "llama-3-8b", context: int = 8192) -> Path:
    """Walls over the SDPA model's."""
    named = {v.name: v for v in read("topk,quest,router,tuned:smollm2", (8,))}
    lap = dict.fromkeys(PARTS, 0.0)
    laps = {name: [lap | {"rest": seconds}] for name, seconds in ({"unattached": 1.0} | walls).items()}
    cell = {
        "what": "shape", "model": model, "context": context, "dtype": "fp32", "threads": 1, "device": "a machine",
        "unattached": "sdpa", "variants": [named[name].to_json() for name in walls],
    }  # fmt: skip
    there = json.loads(path.read_text())["records"] if path.exists() else []
    result = {"laps": laps, "extra_mib": {}, "kept": {}}
    path.write_text(json.dumps({"records": [*there, {"machine": {}, "cell": cell, "result": result}]}))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "eval.db"
    with Store(path) as made:
        made.add_model("f" * 64, "meta-llama/Llama-3.1-8B-Instruct", {"label": "made up"})
        answer(made, "dense", 0, 10)
        answer(made, "topk", 8, 5)
        answer(made, "quest", 8, 8)
        answer(made, "router", 8, 9)
        answer(made, "router/last", 8, 7)
    return path


def joined(store: Path, path: Path, models: list[str] | None = None) -> list[list[pareto.Point]]:
    with Store(store, create=False) as opened:
        return pareto.join(opened, pareto.walls([path]), models).groups


def test_the_two_are_joined_and_nothing_is_dropped(store: Path, tmp_path: Path) -> None:
    path = profile(tmp_path / "p.json", {"dense": 0.8, "topk@8": 0.4, "quest@8": 0.45, "router@8": 0.5})
    profile(path, {"dense": 0.7, "router@8": 0.2}, context=16_384)
    here, beyond = joined(store, path)
    by_policy = {p.policy: p for p in here}
    assert set(by_policy) == {"dense", "topk", "quest", "router", "router/last"}
    router = by_policy["router"]
    assert router.accuracy is not None
    assert router.accuracy.value == 0.9
    assert router.quality == 0.9
    assert router.wall == pareto.Wall(0.5, 0.5 / 0.8)
    verdicts = {name: p.verdict for name, p in by_policy.items()}
    assert verdicts == {
        "dense": "our dense kernel", "topk": "loses quality", "quest": "Pareto win, perhaps",
        "router": "Pareto win, perhaps",
        "router/last": "accuracy only: not profiled",
    }  # fmt: skip
    assert {p.policy for p in here if p.frontier} == {"dense", "topk", "quest", "router"}
    assert {p.policy: p.verdict for p in beyond} == dict.fromkeys(("dense", "router"), "wall only: not evaluated")
    assert {p.task for p in beyond} == {None}


def test_another_command_in_the_same_store_takes_no_examples_away(store: Path, tmp_path: Path) -> None:
    """`closecall compare` runs other policies, on other examples and fewer: they are left out, and that is said."""
    path = profile(tmp_path / "p.json", {"dense": 0.8, "topk@8": 0.4, "quest@8": 0.45, "router@8": 0.5})
    with Store(store) as opened:
        answer(opened, "auto", 8, 6, of=6)
        for policy in ("quest", "fill-on-quest"):
            answer(opened, policy, 8, 2, of=12, seed=1000)
        both = pareto.join(opened, pareto.walls([path]), None)
    (group,) = both.groups
    assert {p.policy: p.accuracy.n for p in group if p.accuracy} == dict.fromkeys(
        ("dense", "topk", "quest", "router", "router/last"), 10
    )
    assert {p.policy: p.accuracy.value for p in group if p.accuracy}["quest"] == 0.8
    left_out = [note for note in both.notes if "is left out" in note]
    assert any("auto@8 is left out: it ran 6 of dense's 10 examples" in note for note in left_out)
    assert any("fill-on-quest@8 is left out: it ran 0 of dense's 10 examples" in note for note in left_out)
    assert all(note in pareto.page(both).text().replace("\n", " ") for note in left_out)


def test_profiles_of_other_models_are_listed_only_if_named(store: Path, tmp_path: Path) -> None:
    path = profile(tmp_path / "p.json", {"dense": 0.8, "topk@8": 0.4})
    profile(path, {"dense": 0.8}, model="mistral-nemo")
    with Store(store, create=False) as opened:
        found = pareto.join(opened, pareto.walls([path]), None, everything=False)
    assert {p.model for group in found.groups for p in group} == {"meta-llama/Llama-3.1-8B-Instruct"}
    assert "Profiles of models that the store does not have are left out: mistral-nemo." in found.notes


def test_only_the_models_asked_for(store: Path, tmp_path: Path) -> None:
    path = profile(tmp_path / "p.json", {"dense": 0.8, "topk@8": 0.4})
    profile(path, {"dense": 0.8}, model="mistral-nemo")
    assert len(joined(store, path)) == 2
    assert len(joined(store, path, ["meta-llama/Llama-3.1-8B-Instruct"])) == 1


def test_a_model_without_a_profile_is_listed(store: Path, tmp_path: Path) -> None:
    here, other = joined(store, profile(tmp_path / "p.json", {"dense": 0.8}, model="mistral-nemo"))
    assert {p.verdict for p in here} == {"accuracy only: not profiled"}
    assert {p.verdict for p in other} == {"wall only: not evaluated"}
    assert pareto.figure([here, other]) is None


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "Pareto win"),
        ({"accuracy": Estimate(1.0, 0.34, 1.0, 2)}, "Pareto win, perhaps"),
        ({"wall": pareto.Wall(0.5, 1.0)}, "wins over SDPA only"),
        ({"wall": pareto.Wall(0.99, 0.9)}, "keeps quality, ties speed"),
        ({"wall": pareto.Wall(1.09, 1.3)}, "keeps quality, loses speed"),
        ({"dense_accuracy": 1.2}, "loses quality"),
        ({"dense_accuracy": None}, "no verdict: dense was not evaluated"),
        ({"dense_accuracy": 0.0}, "no verdict: dense answers nothing"),
    ],
)
def test_verdicts(changes: dict[str, Any], verdict: str) -> None:
    assert replace(POINT, **changes).verdict == verdict


def test_the_frontier_is_what_nobody_beats() -> None:
    def at(accuracy: float, wall: float) -> pareto.Point:
        return replace(POINT, accuracy=Estimate(accuracy, 0, 1, 10), wall=pareto.Wall(wall, wall))

    points = [at(1.0, 1.0), at(0.9, 0.5), at(0.8, 0.5), at(0.7, 0.3), at(0.7, 0.3), at(0.6, 0.4)]
    points.append(replace(POINT, wall=None))
    assert [p.frontier for p in pareto.frontier(points)] == [True, True, False, True, True, False, False]


def test_the_command(command: Command, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = profile(tmp_path / "p.json", {"dense": 0.8, "topk@8": 0.4, "quest@8": 0.45, "router@8": 0.5})
    out = tmp_path / "out"
    assert command("pareto", "--store", store, "--profile", path, "--out", out) == 0
    said = capsys.readouterr().out
    assert "1 rows have only one of the two numbers" in said
    assert "8 (16 a tile)" in said
    row = next(line for line in said.splitlines() if line.startswith("router "))
    assert row.split()[-6:] == ["0.50", "0.62", "yes", "Pareto", "win,", "perhaps"]
    assert "| router | 8 (16 a tile) | 10 | 0.90 [" in (out / "pareto.md").read_text()
    assert all(len(line) <= 120 for line in said.splitlines())
    assert {p.name for p in out.iterdir()} == {
        "pareto.md", "pareto.html", "pareto.json", "pareto-frontier.png", "pareto-frontier.svg",
    }  # fmt: skip
    listed = json.loads((out / "pareto.json").read_text())
    assert {p["policy"]: p["verdict"] for p in listed}["router"] == "Pareto win, perhaps"


def test_a_tuned_policy_is_joined_too_and_has_the_name_that_people_type(
    command: Command, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(store) as made:
        answer(made, "tuned:smollm2", 0, 9)
    path = profile(tmp_path / "p.json", {"dense": 0.8, "quest@8": 0.45, str(Spec.parse("tuned:smollm2")): 0.4})
    assert command("pareto", "--store", store, "--profile", path, "--out", tmp_path / "out") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tuned:smollm2 "))
    assert row.split()[-6:] == ["0.40", "0.50", "yes", "Pareto", "win,", "perhaps"]


def test_what_is_not_there(command: Command, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command("pareto", "--store", store) == 2
    assert "out/profile holds no profile" in capsys.readouterr().err
    assert command("pareto", "--store", store, "--profile", "none.json") == 2
    assert "no such profile: none.json" in capsys.readouterr().err
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({"records": []}))
    assert command("pareto", "--store", store, "--profile", empty) == 2
    assert "no profile of a model or a shape" in capsys.readouterr().err
    path = profile(tmp_path / "p.json", {"dense": 0.8})
    assert command("pareto", "--store", tmp_path / "no.db", "--profile", path) == 2
    assert "no such store" in capsys.readouterr().err
    assert command("pareto", "--store", store, "--profile", path, "--model", "lama") == 2
    assert "unknown model in the store" in capsys.readouterr().err
