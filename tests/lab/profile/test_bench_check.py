"""The regression bench's judgement, on made-up ratios; what it measures with is the attention benchmark's."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from closecall_lab.bench import check

STEADY = [3.0 * math.exp(x) for x in (-0.02, -0.01, 0.0, 0.01, 0.02)]
HERE = {"cpu": "this one", "tier": "avx2", "torch": "2", "cores": 2}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Committed ratios of this machine, and no machine to measure."""
    monkeypatch.setattr(check, "facts", lambda: HERE)
    monkeypatch.setattr("closecall_lab.bench.check.cpu.tiers", lambda: ["avx2"])
    path = tmp_path / "check.json"
    check.write(path, HERE, {"a": STEADY, "b": [2 * x for x in STEADY]})
    return path


def now(monkeypatch: pytest.MonkeyPatch, a: float, b: float) -> None:
    monkeypatch.setattr(check, "run", lambda repeats, seconds: {"a": [a] * repeats, "b": [b] * repeats})


def main(*argv: object) -> int:
    return check.main([str(x) for x in argv])


def test_the_tolerance_follows_from_the_spread() -> None:
    from scipy import stats  # type: ignore[import-untyped]

    wide = [math.exp(2 * math.log(x / 3)) for x in STEADY]
    one, two = check.tolerance(STEADY, 3, 1), check.tolerance(wide, 3, 1)
    assert two == pytest.approx(2 * one)
    spread = math.sqrt(sum(x * x for x in (0.02, 0.01, 0, 0.01, 0.02)) / 4)
    assert one == pytest.approx(stats.t.ppf(0.99, 4) * spread * math.sqrt(1 / 5 + 1 / 3))
    assert check.tolerance(STEADY, 3, 8) > one  # many ratios, the same chance that any of them fails


def test_it_rarely_cries_wolf_and_sees_a_slow_down() -> None:
    draw = random.Random(0)

    def runs(n: int, centre: float) -> dict[str, list[float]]:
        return {name: [centre * math.exp(draw.gauss(0, 0.01)) for _ in range(n)] for name in "abcd"}

    def fails(centre: float) -> float:
        return sum(any(f.slower for f in check.compare(runs(5, 1), runs(3, centre))) for _ in range(300)) / 300

    assert fails(1.0) < 0.04  # 1% by design, and the draws are always the same
    assert fails(0.9) > 0.9  # ten times the spread


def test_a_slow_down_fails(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now(monkeypatch, 2.5, 6.0)
    assert main("--file", file) == 1
    said = capsys.readouterr()
    assert "slower: a fell from 3.000 to 2.500" in said.err
    assert said.out.count("SLOWER") == 1
    now(monkeypatch, 2.99, 6.05)
    assert main("--file", file) == 0
    assert "as before" in capsys.readouterr().out
    now(monkeypatch, 3.9, 6.0)
    assert main("--file", file) == 0
    assert "--update keeps it" in capsys.readouterr().err


def test_new_ratios_are_written_and_added(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now(monkeypatch, 2.5, 6.0)
    assert main("--file", file, "--add") == 0
    assert json.loads(file.read_text())["ratios"]["a"] == [*STEADY, 2.5, 2.5, 2.5]
    assert main("--file", file, "--update") == 0
    assert json.loads(file.read_text()) == {"machine": HERE, "ratios": {"a": [2.5] * 5, "b": [6.0] * 5}}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--update", "--repeats", "4"), "--update needs at least 5"),
        (("--update", "--add"), "name one of the two"),
        (("--seconds", "0"), "--seconds must be above 0"),
        (("--repeats", "x"), "--repeats takes whole numbers"),
    ],
)
def test_bad_input(
    argv: tuple[str, ...], said: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "run", lambda *_: pytest.fail("something was measured"))
    assert main("--file", file, *argv) == 2
    assert said in capsys.readouterr().err


def test_files_that_cannot_be_compared(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"a": [3.0] * 3, "c": [6.0] * 3}
    monkeypatch.setattr(check, "run", lambda *_: measured)
    assert main("--file", file) == 2
    assert "of other cases ('b', ...)" in capsys.readouterr().err
    monkeypatch.setattr(check, "run", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(check, "facts", lambda: HERE | {"cpu": "another"})
    assert main("--file", file) == 2
    assert "of cpu 'this one', and this is 'another'" in capsys.readouterr().err
    for text, why in (("{", "not a file of ratios"), ('{"machine": {}, "ratios": {"a": [1, 2]}}', "too few to know")):
        file.write_text(text)
        assert main("--file", file) == 2
        assert why in capsys.readouterr().err
    assert main("--file", file.with_name("none.json")) == 2
    assert "write it with --update" in capsys.readouterr().err


def test_ratios_of_a_cell() -> None:
    result = {
        "ours": {
            "dense": {"vs_sdpa": 1.2},
            "router-on-quest": {"vs_sdpa": 3.6, "vs_dense": 3.0, "select_ms": 4.0},
        },
        "ms": {"dense": 100.0},
    }
    found = check.ratios({"context": 16384, "dtype": "bf16"}, result)
    assert list(found.values()) == [3.6, 3.0, 1.2, 25.0]
    assert all(name.startswith("16K bf16: ") for name in found)
    assert [c["dtype"] for c in check.bench(1.0).cells()] == ["fp32", "bf16"]
