"""`closecall compare` and `compare capture` from the command line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from closecall import cli, policy
from closecall.rules.router import Router
from closecall.triggers.calibrated import Calibrated
from closecall_lab.eval.compare.capture import Capture


def test_capture_then_compare(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, taken = tmp_path / "out", tmp_path / "captured"
    what = ["--tasks", "probe-needle,probe-scattered:keys=8,questions=3", "--contexts", "512", "--n", "2"]
    assert cli.main(["compare", "capture", "--model", str(tiny), *what, "--layers", "1", "--out", str(taken)]) == 0
    page = capsys.readouterr()
    assert f"4 prompts captured, 4 are in {taken}" in page.out
    assert page.err.count("closecall: captured") == 4
    assert cli.main(["compare", "capture", "--model", str(tiny), *what, "--layers", "1", "--out", str(taken)]) == 0
    assert f"0 prompts captured, 4 are in {taken}" in capsys.readouterr().out

    fill, last = "fill-on-box:aggregate=mass,c=0.5,tile_factor=1", "last-tile-on-quest:tile_factor=1"
    policies = f"dense,router:tile_factor=1,{fill},{last}"
    who = ["--policies", policies, "--against", "quest:tile_factor=1", "--budgets", "4", "--seconds", "0.01"]
    given = ["--model", str(tiny), *what, *who, "--store", str(tmp_path / "results.db"), "--captured", str(taken)]
    assert cli.main(["compare", *given, "--split", "final", "--out", str(out), "--by-layer"]) == 0
    page = capsys.readouterr()
    for title in (
        f"probe-needle at 512 tokens on {tiny}, the final part: 2 examples, 2 questions",
        "Between policies: probe-needle at 512 tokens",
        "Between policies, all of the above",
        f"Captured layers of {tiny}, final part: 2 prompts, 1 layers",
        "Between policies, all texts",
        "Captured prompts of probe-needle",
        "What choosing costs: layer 1 of a captured prompt of 512 tokens, 1 thread",
        "Error by layer, budget 4",
        "Gold mass by layer, budget 4",
    ):
        assert title in " ".join(page.out.split())
    text = (out / "compare.md").read_text()
    assert "split: final (odd example numbers)" in text
    assert "## Mass by layer, budget 4" in text
    data = json.loads((out / "compare.json").read_text())
    assert data["settings"]["split"] == "final (odd example numbers)"
    assert [g["task"] for g in data["answers"]] == ["probe-needle", "probe-scattered:questions=3,keys=8"]
    duels = {d["policy"]: d for g in data["answers"][:1] for d in g["duels"] if d["against"] == "quest:tile_factor=1"}
    for name in (fill, last):
        assert duels[name]["spent"] == {"mean": 1, "least": 1, "most": 1}
        assert duels[name]["comparison"] is not None
    assert duels["router:tile_factor=1"]["comparison"] is None
    by_policy = {s["policy"]: s for s in data["captured"]["all"]["policies"]}
    assert by_policy["dense"]["error"] == pytest.approx(0, abs=1e-6)
    assert 0 < by_policy[fill]["mass"] < 1
    assert by_policy["dense"]["gold"] == 1
    assert 0 < by_policy[fill]["gold"] < 1
    assert by_policy["dense"]["gold_there"] == by_policy[fill]["gold_there"]
    assert {c["policy"]: c["vectors"] for c in data["costs"]}[fill] == 2
    assert {p.number for p in Capture.open(taken).prompts()} == {0, 1}


def test_only_what_was_captured(captured: Capture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(captured.directory, tmp_path / "copy")
    who = ["--policies", "topk:tile_factor=1", "--against", "quest:tile_factor=1", "--budgets", "4", "--seconds", "0"]
    assert cli.main(["compare", "--captured", str(tmp_path / "copy"), *who]) == 0
    page = capsys.readouterr().out
    assert "choose part: 2 prompts, 2 layers" in page
    assert "What choosing costs" not in page


def test_a_policy_from_a_file(captured: Capture, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibrated layer by layer: each layer is judged by its own threshold."""
    shutil.copytree(captured.directory, tmp_path / "copy")
    made = policy("router", budget=9, tile_factor=1, rho=2)
    assert isinstance(made.rule, Router)
    rule = dataclasses.replace(made.rule, trigger=Calibrated((1.0, 0.0)))  # all tiles of layer 0, none of 1
    (tmp_path / "fitted.json").write_text(made.replace(rule=rule).to_json())
    given = ["--policies", f"file:{tmp_path / 'fitted.json'}", "--against", "quest:tile_factor=1", "--budgets", "4"]
    given += ["--seconds", "0.01", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", "--captured", str(tmp_path / "copy"), *given]) == 0
    page = capsys.readouterr()
    assert "router:saved=fitted-" in page.out
    assert "is not timed: it has a threshold for each layer of its model" in page.err
    assert page.err.count("warning: tile budget 4 can leave one free block") == 1  # then every margin is 1
    layers = json.loads((tmp_path / "out" / "compare.json").read_text())["captured"]["by_layer"]
    kept = {
        number: next(s["effective_budget"] for s in scores if s["policy"].startswith("router:saved="))
        for number, scores in layers.items()
    }
    top_4, top_8 = (sum(min(level, t + 1) for t in range(8)) / 8 for level in (4, 8))  # of 8 tiles
    assert (kept["0"], kept["1"]) == (top_8, top_4)
    assert any(s["policy"].startswith("router/matched:saved=fitted-") for s in layers["0"])


WRONG = {
    "compare": "nothing to do: name --model and --tasks, or --captured",
    "compare --model tiny": "--tasks is missing",
    "compare --tasks probe-needle": "--model is missing",
    "compare --model tiny --tasks probe-needle --policies qest": "did you mean 'quest'?",
    "compare --model tiny --tasks probe-needle --policies file:none.json": "no policy file 'none.json'",
    "compare --model tiny --tasks probe-needle --split finl": "unknown split 'finl': did you mean 'final'?",
    "compare --model tiny --tasks probe-needle --budgets 1": "keeps 2 blocks a tile",
    "compare --model tiny --tasks probe-needle --seconds -1": "--seconds must be a number of at least 0, got -1.0",
    "compare --model tiny --tasks probe-needle --seconds nan": "--seconds must be a number of at least 0, got nan",
    "compare --model tiny --tasks probe-needle --out setup.py": "setup.py is a file; name a directory",
    "compare --captured nowhere": "no capture in nowhere",
    "compare capture": "--model is missing",
    "compare capture --model tiny": "--tasks is missing",
    "compare capture --model tiny --tasks probe-needle --layers one": "--layers takes layer numbers",
    "compare capture --model tiny --tasks probe-needle --max-gb 0": "--max-gb must be above 0",
    "compare capture --model tiny --tasks probe-needle --n 0": "--n takes whole numbers",
    "compare captur": "did you mean 'capture'?",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_gets_a_line_and_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    error = capsys.readouterr().err
    assert WRONG[line] in error
    assert error.count("\n") == 1
