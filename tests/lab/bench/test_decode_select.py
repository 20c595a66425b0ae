"""The benchmark of kept summaries, end to end on the smallest size that leaves something out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from closecall import cli
from closecall.backends import cpu
from closecall.summaries import Summaries
from closecall_lab.bench.benchmarks import decode_select
from closecall_lab.spine.timing import Samples


@pytest.mark.skipif(not cpu.tiers(), reason="no native code")
def test_it_measures_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--contexts", "512", "--dtypes", "fp32", "--dims", "32", "--heads", "4", "--kv-heads", "2", "--budget", "3"]
    argv += ["--seconds", "0.01", "--repeats", "3", "--out", str(tmp_path)]
    threads = torch.get_num_threads()
    try:
        assert cli.main(["bench", "decode-select", *argv]) == 0
    finally:
        torch.set_num_threads(threads)
    (record,) = json.loads((tmp_path / "decode_select.json").read_text())["records"]
    rows = record["result"]["rows"]
    assert [row["policy"] for row in rows] == ["quest", "auto"]
    for row in rows:
        assert 0 < row["kept_select_ms"] < row["kept_step_ms"]
        assert 0 < row["select_ms"] < row["step_ms"]
    quest, auto = (row["kept_mib"] * 2**20 for row in rows)
    assert quest == 8 * 2 * (2 * 32) * 4  # blocks, key heads, a box
    assert auto == 1.5 * quest  # and a key
    assert "Sparse decoding: " in capsys.readouterr().out


def test_what_is_compared() -> None:
    laps = {"quest 2": [{"select": 8.0, "attend": 2.0}] * 3, "quest 2 kept": [{"select": 0.5, "attend": 2.0}] * 3}
    row = decode_select._row(Samples(laps), "quest", 2, Summaries())
    assert (row["select_ms"], row["kept_select_ms"], row["select_ratio"]) == (8000, 500, 16)
    assert (row["step_ms"], row["kept_step_ms"], row["step_ratio"]) == (10000, 2500, 4)


@pytest.mark.skipif(not cpu.tiers(), reason="no native code")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--heads", "5", "--kv-heads", "2"], "--heads 5 is not a multiple of --kv-heads 2"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--contexts", "4k"], "quest cuts nothing at 4K"),
        (["--dtypes", "fp31"], "did you mean 'fp32'"),
    ],
)
def test_bad_options(argv: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["bench", "decode-select", *argv, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_without_native_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    none: list[Any] = []
    monkeypatch.setattr(cpu, "tiers", lambda: none)
    assert cli.main(["bench", "decode-select"]) == 2
    assert "the native module is not built" in capsys.readouterr().err
