"""The frame around benchmarks: what is stored, skipped, shown and drawn, on a benchmark that measures nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from closecall import info
from closecall_lab.bench import base, over_context
from closecall_lab.spine.results import Facts
from closecall_lab.spine.table import Column, Table

ROWS = [{"context": n, "dtype": "fp32", "dim": 64, "ratio": n / 256} for n in (256, 512)]


@dataclass
class Fake(base.Benchmark):
    contexts: tuple[int, ...] = (256, 512)
    fail_at: int | None = None
    measured: list[int] = field(default_factory=list)
    name: str = "fake"

    def cells(self) -> list[Facts]:
        return [{"context": n} for n in self.contexts]

    def label(self, cell: Facts) -> str:
        return f"context {cell['context']}"

    def guess(self, cell: Facts) -> float:
        return float(cell["context"])

    def measure(self, cell: Facts) -> Facts:
        if cell["context"] == self.fail_at:
            raise RuntimeError("the machine fell over")
        self.measured.append(cell["context"])
        return {"ratio": cell["context"] / 256}

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table:
        columns = [Column("context", lambda r: r["context"]), Column("ratio", lambda r: r["ratio"], ".2f")]
        return Table("Fake", columns, [cell | result for cell, result in measured], ["A note."])

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Any]:
        series = [over_context.Series("ratio", "us", "#000000", "o")]
        return {"fake": over_context.speedups("Title", "subtitle", ROWS, series, ("dtype", "dim"))}


def test_a_run_leaves_results_page_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base.run(Fake(), tmp_path / "deep" / "out")
    said = capsys.readouterr()
    assert "[1/2] context 256 ... about 12 min 48 s left" in said.err  # 256 + 512 s, as guessed
    assert "    512   2.00" in said.out
    files = {path.name: path for path in (tmp_path / "deep" / "out").iterdir()}
    assert set(files) == {"fake.json", "fake.md", "fake.png", "fake.svg"}
    assert files["fake.png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in files["fake.svg"].read_text()
    assert "| 512 | 2.00 |" in files["fake.md"].read_text()
    records = json.loads(files["fake.json"].read_text())["records"]
    assert [(r["cell"], r["result"]) for r in records] == [
        ({"context": 256}, {"ratio": 1.0}),
        ({"context": 512}, {"ratio": 2.0}),
    ]
    assert {json.dumps(r["machine"]) for r in records} == {json.dumps(info.machine())}


def test_finished_cells_are_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base.run(Fake(), tmp_path)
    more = Fake(contexts=(256, 512, 1024))
    capsys.readouterr()
    base.run(more, tmp_path)
    assert more.measured == [1024]
    said = capsys.readouterr()
    assert "2 of 3 cells are in" in said.err
    assert "   1024   4.00" in said.out
    assert "    256   1.00" in said.out  # from the first run


def test_fresh_measures_everything_again(tmp_path: Path) -> None:
    base.run(Fake(), tmp_path)
    again = Fake(contexts=(512,))
    base.run(again, tmp_path, fresh=True)
    assert again.measured == [512]
    assert len(json.loads((tmp_path / "fake.json").read_text())["records"]) == 1


def test_what_was_finished_before_a_failure_is_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="fell over"):
        base.run(Fake(fail_at=512), tmp_path)
    rest = Fake()
    base.run(rest, tmp_path)
    assert rest.measured == [512]


def test_results_of_another_machine_are_left_alone_and_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.run(Fake(), tmp_path)
    elsewhere = info.machine() | {"cpu": "another"}
    monkeypatch.setattr(info, "machine", lambda: elsewhere)
    other = Fake()
    base.run(other, tmp_path)
    assert other.measured == [256, 512]
    assert len(json.loads((tmp_path / "fake.json").read_text())["records"]) == 4


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_file_that_holds_no_results(text: str, tmp_path: Path) -> None:
    (tmp_path / "fake.json").write_text(text)
    with pytest.raises(ValueError, match="start over with --fresh"):
        base.run(Fake(), tmp_path)
    base.run(Fake(), tmp_path, fresh=True)


INTERRUPTED = """
import signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_frame import Fake, base

class Slow(Fake):
    def measure(self, cell):
        if cell["context"] == 512:
            x = torch.ones(16384, 16384)
            print("now", flush=True)
            x @ x  # one call that runs for many seconds and does not look at signals
        return super().measure(cell)

torch.set_num_threads(1)
base.run(Slow(), Path(sys.argv[1]))
"""


def test_ctrl_c_in_the_middle_of_a_kernel(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "interrupted; finished cells are in" in said
    assert "Traceback" not in said
    rest = Fake()
    base.run(rest, tmp_path)
    assert rest.measured == [512]
