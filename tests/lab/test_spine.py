"""The spine: where results go, files that appear when whole, progress, and tables that fit a terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from closecall_lab.spine import figure, files, options, progress
from closecall_lab.spine.table import Column, Table


def test_output_directories_are_made_before_the_work(tmp_path: Path) -> None:
    assert options.output_dir("--out", tmp_path / "a" / "b").is_dir()
    assert options.output_file("--out", tmp_path / "c" / "d.json").parent.is_dir()
    assert not (tmp_path / "c" / "d.json").exists()


@pytest.mark.parametrize("check", [options.output_dir, options.output_file])
def test_a_file_in_the_way(check: Callable[[str, Path], Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match=f"--out .*: {tmp_path / 'file'} is a file; name a directory"):
        check("--out", tmp_path / "file" / "deep" / "result")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory; name a file in it"):
        options.output_file("--out", tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.json").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match="cannot be written to; name another directory"):
        options.output_dir("--out", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "old.json")
    with pytest.raises(ValueError, match="cannot be written to; name another file"):
        options.output_file("--out", tmp_path / "old.json")


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.txt"
    files.write(path, "old")

    def fails() -> None:
        with files.draft(path) as part:
            part.write_text("new")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fails()
    assert path.read_text() == "old"
    files.write(path, b"new")
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


def test_a_countdown_learns_from_the_clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    for item in progress.countdown([10, 20, 30], str, float):
        now[0] += 2 * item  # twice what was guessed
    assert [line.split("... ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "about 1 min 00 s left", "about 1 min 40 s left", "about 1 min 00 s left",
    ]  # fmt: skip


def test_a_line_stays_off_a_terminal_and_renews_itself_on_one() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, expected in ((io.StringIO(), "a\nb\n"), (Terminal(), "\r\x1b[2Ka\r\x1b[2Kb\n")):
        line = progress.Line(out)
        line.show(lambda: "a")
        line.show(lambda: pytest.fail("too soon"))
        line.finish("b")
        assert out.getvalue() == expected


WIDE = Table(
    "A title that is much longer than forty letters and goes on",
    [
        Column("policy", lambda r: r["name"], left=True),
        *(Column(f"a long title {i}", lambda r, i=i: r["value"] + i, ".2f") for i in range(6)),  # type: ignore[misc]
    ],
    [{"name": "router-on-quest", "value": 0.5}, {"name": "topk", "value": 0.25}],
    ["A note that is longer than forty letters too, as notes are."],
)


def test_a_table_without_rows_keeps_its_title_and_notes() -> None:
    nothing = Table("Times", (Column("ms", lambda r: r["ms"]),), [], ["failed at 8K"])
    assert nothing.text() == "Times\n\nfailed at 8K"
    assert nothing.markdown() == "# Times\n\n\n- failed at 8K\n"


def test_a_wide_table_comes_in_parts_that_name_their_rows() -> None:
    lines = WIDE.text(width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.split()[1:] for line in lines if line.startswith("router-on-quest")] == [
        ["0.50", "1.50", "2.50"], ["3.50", "4.50", "5.50"],
    ]  # fmt: skip
    narrow = Table("T", WIDE.columns[:2], WIDE.rows)
    assert narrow.text().splitlines()[2] == "policy           a long title 0"


def test_long_names_of_panels_are_broken_behind_commas() -> None:
    policy = "router-on-quest:candidates=4,outlying=1,pool=64,unpooled=16@33"
    lines = figure.broken(policy).split("\n")
    assert "".join(lines) == policy
    assert len(lines) == 2
    assert all(len(line) <= 48 for line in lines)
    assert all(line.endswith(",") for line in lines[:-1])
    assert figure.broken("auto@33") == "auto@33"
