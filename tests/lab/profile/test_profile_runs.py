"""Profiles end to end on tiny models, shapes and contexts: what is stored, said, resumed and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from closecall import info
from closecall.models.entry import Shape
from closecall_lab.bench.profile import shapes, tables
from closecall_lab.bench.profile.parts import PARTS, elsewhere, function
from closecall_lab.bench.profile.policies import read
from closecall_lab.bench.profile.shape_run import LINEAR, REST, Factors, ShapeProfile, multiply
from closecall_lab.bench.profile.shapes import LayerPart
from closecall_lab.spine import figure, memory

Command = Callable[..., int]
SHORT = ("--threads", 1, "--rounds", 2, "--device", "cpu")
BUDGET = 3  # 6 blocks a tile: at 512 tokens something is left out, at 256 nothing


def records(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: list[dict[str, Any]] = json.loads(path.read_text(), parse_constant=refuse)["records"]
    return found


def test_a_model(command: Command, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv: list[object] = ["profile", "--model", tiny, "--contexts", "256,512,1k", "--budget", BUDGET, *SHORT]
    argv += ["--policies", "topk,router-on-quest", "--dtype", "fp32", "--out", tmp_path]
    assert command(*argv) == 0
    said = capsys.readouterr()
    assert "was trained on 512 tokens: at 1K times are times" in said.err
    stored = records(tmp_path / "profile-tiny.json")
    assert [r["cell"]["context"] for r in stored] == [256, 512, 1024]
    for r in stored:
        laps = r["result"]["laps"]
        assert list(laps) == ["unattached", "dense", "topk@3", "router-on-quest@3"]
        assert all(len(mine) == 2 and list(lap) == list(PARTS) for mine in laps.values() for lap in mine)
        assert all(lap["rest"] > 0 and lap["attend"] > 0 for mine in laps.values() for lap in mine)
    short, long = stored[0]["result"], stored[1]["result"]
    told = memory.mark() is not None
    assert all((mib is not None) == told for mib in long["extra_mib"].values())
    assert short["laps"]["topk@3"][0]["ranking"] == 0  # it covers everything
    assert long["laps"]["topk@3"][0]["summaries"] > 0
    assert long["kept"]["topk@3"]["effective_budget"] == (1 + 2 + 3 + 4 + 5 + 6 + 6 + 6) / 8
    for text in ("Where the time goes", "Crossover", "overtakes our dense at", "nothing is multiplied",
                 "keep 6 blocks a tile (budget 3 x 2)"):  # fmt: skip
        assert text in said.out
        assert text in (tmp_path / "profile-tiny.md").read_text()
    stems = ("profile-tiny", "profile-tiny-parts")
    assert all(len(line) <= 120 for line in said.out.splitlines())
    assert "topk@3 cuts nothing at 256: its budget covers every block there" in said.err
    assert {p.name for p in tmp_path.iterdir()} == {
        "profile-tiny.json", "profile-tiny.md", *(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")),
    }  # fmt: skip

    assert command(*argv) == 0
    assert "3 of 3 cells are in" in capsys.readouterr().err


Profiled = list[tuple[dict[str, Any], dict[str, Any]]]


def profiled(shape: Shape, part: LayerPart, contexts: tuple[int, ...] = (512,)) -> tuple[Profiled, str]:
    """Cells with their results, and the text; no pictures, which take longer than all else."""
    bench = ShapeProfile(
        shape=shape, contexts=contexts, dtypes=("fp32", "bf16"), policies=read("topk,router", (BUDGET,)), threads=(1,),
        rounds=2, part=lambda n: part, name="profile",
    )  # fmt: skip
    measured = [(cell, bench.measure(cell)) for cell in bench.cells()]
    return measured, bench.table(info.machine(), measured).text()


@pytest.mark.usefixtures("no_memory")
def test_a_part_of_a_layer_multiplied(small: Shape) -> None:
    found, said = profiled(small, LayerPart(q_heads=3, kv_heads=1, dense_heads=1, rows=64), contexts=(256, 512))
    assert [(cell["context"], cell["dtype"]) for cell, _ in found] == [
        (256, "fp32"), (256, "bf16"), (512, "fp32"), (512, "bf16"),
    ]  # fmt: skip
    for cell, result in found:
        assert set(result["as_measured"]) == {"unattached", "dense", "topk@3", "router@3", REST}
        factors = {name: Factors(**by) for name, by in result["factors"].items()}
        assert result["laps"] == multiply(result["as_measured"], factors)
        rests = {name: [lap["rest"] for lap in laps] for name, laps in result["laps"].items()}
        assert len({tuple(x) for x in rests.values()}) == 1  # the same layer is the rest of all
        assert rests["topk@3"][0] == result["as_measured"][REST][0]["rest"] * (cell["context"] / 64) * 3
    assert found[2][1]["kept"]["topk@3"]["effective_budget"] == (1 + 2 + 3 + 4 + 5 + 6 + 6 + 6) / 8
    assert "on 3 of 6 query heads on 1 of 2 key heads at the full context; times 2." in said
    assert "on 1 of 6 query heads on one key head at the full context; times 6." in said


@pytest.mark.usefixtures("no_memory")
def test_a_whole_layer_in_one_piece(small: Shape) -> None:
    ((_, result), *_), _ = profiled(small, LayerPart(q_heads=6, kv_heads=2, dense_heads=6, rows=512))
    laps, raw = result["laps"], result["as_measured"]
    assert REST not in raw
    for name, mine in laps.items():
        for scaled, measured in zip(mine, raw[name], strict=True):
            assert scaled == {part: 3 * seconds for part, seconds in measured.items()}
            assert sum(scaled.values()) == pytest.approx(function(scaled) + elsewhere(scaled))


@pytest.mark.usefixtures("no_memory")
def test_a_hybrid_has_its_linear_layers_apart(hybrid: Shape) -> None:
    ((_, result), *_), said = profiled(hybrid, LayerPart(q_heads=2, kv_heads=1, dense_heads=2, rows=64))
    (linear, *_) = result["as_measured"][LINEAR]
    assert function(linear) == 0  # no attention is in it
    assert result["laps"]["topk@3"][0]["linear layers"] == linear["rest"] * (512 / 64) * 3
    assert "1 of full attention, and 3 linear ones" in said


def test_what_amdahl_allows() -> None:
    def lap(**seconds: float) -> dict[str, float]:
        return dict.fromkeys(PARTS, 0.0) | seconds

    cell = {"context": 128 * 1024, "unattached": "sdpa"}
    result: dict[str, Any] = {
        "laps": {
            "unattached": [lap(attend=6, rest=4)] * 3,
            "dense": [lap(attend=4, rest=4)] * 3,
            "router-on-quest@33": [lap(ranking=0.25, attend=0.75, around=0.5, rest=4.5)] * 3,
        },
        "extra_mib": {},
        "kept": {"router-on-quest@33": {"effective_budget": 92.4}},
    }
    base, dense, routed = (tables.row(cell, result, name) for name in result["laps"])
    assert base["attention_share"] == 0.6
    assert base["floor"] == 0.4
    assert dense["over_unattached"] == 0.8
    assert routed["over_unattached"] == 0.6
    assert routed["over_dense"] == 0.75
    assert routed["bound_over_unattached"] == 0.5  # 4 of the rest, 1 of selection and attention, over 10
    assert routed["bound_over_dense"] == 5 / 8
    assert routed["over_bound"] == 1.2
    assert routed["attention_share"] == 0.25
    assert routed["effective_budget"] == 92.4


@pytest.mark.usefixtures("no_memory")
def test_the_report_of_files(
    command: Command, small: Shape, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "known_shape", lambda name: small)
    monkeypatch.setattr(figure, "save", lambda *_: [])
    given = ("--policies", "topk", "--budget", BUDGET, "--dtypes", "fp32", *SHORT, "--out", tmp_path)
    assert command("profile", "--shape", "llama-3-8b", "--contexts", "256,512", "--rows", 64, *given) == 0
    capsys.readouterr()
    assert command("profile", "--report", tmp_path / "profile-llama-3.1-8b.json") == 0
    said = capsys.readouterr().out
    assert said.startswith("## Prefill of one layer of llama-3.1-8b's dimensions, random weights x 3: ")
    assert "\n### Where the time goes\n" in said

    assert command("profile", "--report", tmp_path / "none.json") == 2
    assert "no such file" in capsys.readouterr().err
    other = tmp_path / "attention.json"
    other.write_text(json.dumps({"records": [{"machine": {}, "cell": {"context": 1}, "result": {}}]}))
    assert command("profile", "--report", other) == 2
    assert "results of another benchmark" in capsys.readouterr().err
    other.write_text(json.dumps({"records": []}))
    assert command("profile", "--report", other) == 2
    assert "nothing is in" in capsys.readouterr().err


def test_the_paper_stands_beside() -> None:
    def lap(attend: float) -> dict[str, float]:
        return dict.fromkeys(PARTS, 0.0) | {"attend": attend, "rest": 4.0}

    cell = {
        "what": "shape", "model": "qwen2.5-7b-1m", "context": 128 * 1024, "dtype": "fp32", "threads": 1,
        "unattached": "sdpa",
    }  # fmt: skip
    laps = {"unattached": [lap(16)], "dense": [lap(6)], "router-on-quest@33": [lap(1)], "topk@33": [lap(0.5)]}
    table = tables.paper([(cell, {"laps": laps, "extra_mib": {}, "kept": {}})])
    assert table is not None
    routed, top = table.rows
    assert routed["paper_share"] == 0.63
    assert (routed["share"], routed["dense_share"]) == (0.8, 0.6)
    assert routed["paper_wall"] == 0.62
    assert top["paper_wall"] is None  # the paper has the winner's only
    assert "| 128K | fp32 | 1 | router-on-quest@33 | 63% | 80% | 60% | 0.62 | 0.25 | 0.50 |" in table.markdown()
    assert tables.paper([(cell | {"model": "mistral-nemo"}, {"laps": laps, "extra_mib": {}, "kept": {}})]) is None


def test_help_lists_shapes_by_the_names_it_takes(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("profile", "--help")
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in shapes.NAMES)
    assert all(shapes.shape(name) for name in shapes.NAMES)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "name either --model or --shape"),
        (("--model", "probe", "--shape", "llama-3-8b"), "name either --model or --shape"),
        (("--shape", "lama-3-8b"), "did you mean 'llama-3-8b'?"),
        (("--shape", "llama-3-8b", "--policies", "qest"), "did you mean 'quest'?"),
        (("--shape", "llama-3-8b", "--rounds", "0"), "--rounds takes whole numbers from 1 up"),
        (("--shape", "llama-3-8b", "--dtypes", "fp31"), "did you mean 'fp32'?"),
        (("--shape", "llama-3-8b", "--head-groups", "9"), "has 8 key heads"),
        (("--shape", "llama-3-8b", "--contexts", "4096k", "--device", "cpu"), "bytes of memory"),
        (("--model", "probe", "--dtypes", "fp32,bf16"), "run the command once for each"),
    ],
)
def test_bad_input(command: Command, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("profile", *argv) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_does_not_fit(
    command: Command, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       10 kB\nMemAvailable:       10 kB\n")
    monkeypatch.setattr("closecall_lab.bench.validate.device.MEMINFO", meminfo)
    assert command("profile", "--model", tiny, "--contexts", "512", *SHORT) == 2
    error = capsys.readouterr().err
    assert f"{tiny} at 512 tokens needs about" in error
    assert "bytes of memory and 10,240 are there" in error
