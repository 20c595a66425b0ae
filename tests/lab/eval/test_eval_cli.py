"""`closecall eval`: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import grid_of, options, results
from test_store import add_all, cell_of, run_of

from closecall import cli
from closecall_lab.eval import executors, progress, runner, store
from closecall_lab.eval.cli import read
from closecall_lab.eval.executors import Job, Result
from closecall_lab.eval.grid import Grid
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store

pytestmark = pytest.mark.usefixtures("fewer_draws")


def test_a_grid_from_the_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "results.db", tmp_path / "results.json"
    given = ["--model", str(tiny), "--tasks", "probe-needle", "--contexts", "1k", "--budgets", "5", "--n", "2"]
    given += ["--policies", "dense,topk:tile_factor=1,router:tile_factor=1,q=0.3", "--controls", "--store", str(path)]
    assert cli.main(["eval", *given, "--export", str(out)]) == 0
    page = capsys.readouterr()
    assert "probe-needle at 1024 tokens on tiny: 2 examples, 2 questions" in page.out
    assert str(tiny) not in page.out + page.err.replace(str(tmp_path), "")
    assert "Loading weights" not in page.err
    for policy in ("dense", "topk:tile_factor=1", "router:q=0.3,tile_factor=1", "router/matched:q=0.3,tile_factor=1"):
        assert any(line.startswith(f"{policy} ") for line in page.out.splitlines()), policy
    assert "Where the router's lift comes from" in page.out
    assert "12/12 runs" in page.err
    assert "12 rows written" in page.err
    assert len(json.loads(out.read_text())) == 12
    with Store(path) as found:
        assert {row.cell.policy for row in found.rows()} == {
            "dense", "topk:tile_factor=1", "router:q=0.3,tile_factor=1", "router/random:q=0.3,tile_factor=1",
            "router/last:q=0.3,tile_factor=1", "router/matched:q=0.3,tile_factor=1",
        }  # fmt: skip
    assert cli.main(["eval", "--store", str(path), "--export", str(tmp_path / "again.csv")]) == 0
    assert "12 rows written" in capsys.readouterr().err


def test_exports_are_utf_8_wherever_they_are_written(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as made:
        made.add_model("m", "modèle", {})
        add_all(made, [(cell_of(), run_of())])
    code = "import sys; from closecall import cli; sys.exit(cli.main(sys.argv[1:]))"
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for ending in ("csv", "json"):
        out = tmp_path / f"out.{ending}"
        command = [sys.executable, "-c", code, "eval", "--store", str(tmp_path / "s.db"), "--export", str(out)]
        done = subprocess.run(command, env=plain, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        written = out.read_text(encoding="utf-8")
        assert "modèle" in written or r"mod\u00e8le" in written


WRONG = {
    "": "nothing to do: name --model and --tasks",
    "--model tiny": "--tasks is missing",
    "--tasks probe-needle": "--model is missing",
    "--model tiny --tasks probe-needle --policies routr": "unknown policy 'routr': did you mean 'router'?",
    "--model tiny --tasks probe-needle --contexts 8kb": "--contexts takes whole numbers from 1 up",
    "--model tiny --tasks probe-needle --budgets 0": "--budgets takes whole numbers from 1 up",
    "--model tiny --tasks probe-needle --budgets 1": "topk at budget 1 keeps 2 blocks a tile",
    "--model tiny --tasks probe-needle --n none": "--n takes whole numbers",
    "--model tiny --tasks probe-needle --seed -3": "seed must be a whole number of at least 0, got -3",
    "--model tiny --tasks probe-needle --jobs 0": "--jobs takes whole numbers",
    "--model tiny --tasks probe-needel": "unknown task 'probe-needel': did you mean 'probe-needle'?",
    "--model tiny --tasks lm-eval:": "a task of lm-eval is written lm-eval:NAME,option=value, got 'lm-eval:'",
    "--model tiny --tasks lm-eval:arc_easy,shot=5": "option of task 'lm-eval:arc_easy' 'shot': did you mean 'shots'?",
    "--model tiny --tasks lm-eval:arc_easy,shots=few": "task 'lm-eval:arc_easy' must be a whole number, got 'few'",
    "--model tiny --tasks lm-eval:arc_easy,chat=maybe": "chat of task 'lm-eval:arc_easy' is yes or no, got 'maybe'",
    "--model smolm2 --tasks probe-needle": "did you mean 'smollm2'?",
    "--model tiny --tasks probe-needle --executor rey": "unknown executor 'rey': did you mean 'ray'?",
    "--model tiny --tasks probe-needle --address here:1": "--address is a Ray cluster's",
    "--export out.csv": "no such store",
    "--model probe --tasks probe-needle --contexts 99999999999999999999": "--contexts takes whole numbers up to",
    "--model probe --tasks probe-needle --contexts 1": "'probe-needle' needs a context of at least 102 tokens, got 1: ",
    "--model probe --tasks text --contexts 1": "task 'text' needs a context of at least 2 tokens",
    "--model probe --tasks probe-needle --dtype fp8": "unknown dtype 'fp8': did you mean 'fp32'?",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_gets_a_line_and_code_2(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", *line.split(), "--store", str(tmp_path / "results.db")]) == 2
    error = capsys.readouterr().err
    assert WRONG[line] in error
    assert error.count("\n") == 1


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(tmp_path / "none"), "--tasks", "probe-needle", "--store", str(tmp_path / "results.db")]
    assert cli.main(["eval", *given]) == 1
    assert "no such directory" in capsys.readouterr().err


def test_a_newer_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.db"
    with Store(path) as made:
        made.connection.execute("UPDATE meta SET value = 7 WHERE name = 'semantics'")
    assert cli.main(["eval", "--model", "tiny", "--tasks", "probe-needle", "--store", str(path)]) == 2
    assert "written by a newer closecall (semantics version 7, ours is 1)" in capsys.readouterr().err


def test_a_full_disk(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message, a code that is not zero, and a store that goes on once there is room."""
    path = tmp_path / "results.db"
    Store(path).close()
    connect = sqlite3.connect

    def small(*args: object, **options: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)  # type: ignore[call-overload]
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 8}")
        return connection

    with monkeypatch.context() as patched:
        patched.setattr(store.sqlite3, "connect", small)
        assert cli.main(["eval", *options(tiny, path)]) == 1
    assert "is full: make room; what is stored is safe, and the same command goes on" in capsys.readouterr().err
    before = results(path)
    assert before
    assert cli.main(["eval", *options(tiny, path)]) == 0
    after = results(path)
    assert len(after) == 48
    assert all(row in after for row in before)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, seconds: dict[int, float]) -> progress.Progress:
    grid = Grid(("m",), ("niah-single",), (1000, 2000), (Spec("dense"), Spec("topk")), (8,), 5)
    bar = progress.Progress(grid, "tiny", out=out)
    for context, wall in seconds.items():
        for spec, budget in grid.variants:
            run = run_of(
                wall=wall,
                answers=[{"score": 1.0 if spec.preset == "dense" else 0.938, "correct": spec.preset == "dense"}],
            )
            bar.add(Result(Job("t", context, 0, 0, ()), spec, budget, "key", run))
    return bar


def test_progress_tells_scores_and_time_left() -> None:
    bar = shown(io.StringIO(), {1000: 10.0, 2000: 30.0})
    assert bar.line() == "tiny: 4/20 runs, about 5 min 20 s left   dense 1.00  topk@8 0.94"  # 8 x 10 s and 8 x 30 s
    half = shown(io.StringIO(), {1000: 10.0})
    assert half.left() == 8 * 10 + 10 * 20  # a context not seen yet: in proportion
    assert shown(io.StringIO(), {}).line() == "tiny: 0/20 runs"


@pytest.mark.usefixtures("any_lm_eval_task")
def test_progress_with_documents_of_their_own_lengths() -> None:
    grid = Grid(("m",), ("niah-single", "lm-eval:arc_easy"), (1000, 2000), (Spec("dense"),), (8,), 5)
    bar = progress.Progress(grid, "tiny", out=io.StringIO())
    assert bar.total == 15
    for context, wall in ((0, 7.0), (1000, 2.0)):
        run = run_of(wall=wall, answers=[{"score": 1.0}])
        bar.add(Result(Job("t", context, 0, 0, ()), Spec("dense"), 0, "key", run))
    assert bar.left() == 4 * 7 + 4 * 2 + 5 * 4  # 2000 tokens in proportion to 1000, not to the documents


def test_known_runs_count_as_done_and_not_as_time() -> None:
    bar = shown(io.StringIO(), {})
    bar.add(Result(Job("t", 1000, 0, 0, ()), Spec("dense"), 0, "key", None))
    assert bar.line() == "tiny: 1/20 runs"


def test_a_terminal_gets_one_line_and_a_file_few() -> None:
    screen, file = Screen(), io.StringIO()
    shown(screen, {1000: 1.0, 2000: 1.0}).finish()
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().count("\r") >= 2
    shown(file, {1000: 1.0, 2000: 1.0}).finish()
    assert len(file.getvalue().splitlines()) == 2  # the first at once, the last at the end


@pytest.mark.parametrize(
    ("name", "message"), [("taken", "is a directory"), ("results.txt", "ending of an export"), ("file/x.csv", "file")]
)
def test_an_export_that_cannot_be_written_is_refused_before_the_work(
    tiny: Path,
    tmp_path: Path,
    name: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("measured first"))
    assert cli.main(["eval", *options(tiny, tmp_path / "a.db"), "--export", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("workers", ["starting", "working"])
def test_interrupted_it_says_how_to_go_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str, ending: signal.Signals
) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), ending)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs are started with it ignored
    monkeypatch.setattr(executors, "start", stopped)
    said: list[str] = []
    identity = executors.Identity("print", "none", {})
    waiting: Any = SimpleNamespace(identity=lambda: identity, run=stopped)
    with Store(tmp_path / "a.db") as opened:
        run = runner.run if workers == "starting" else partial(runner.run_model, workers=waiting)
        try:
            with pytest.raises(KeyboardInterrupt):
                run(grid_of(tiny), opened, jobs=2, say=said.append)
        finally:
            signal.signal(signal.SIGINT, heeded)
    assert said == [f"interrupted; finished runs are in {tmp_path / 'a.db'}: the same command goes on from there"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_auto_is_among_the_policies_of_default() -> None:
    args = cli.parser().parse_args(["eval", "--model", "m", "--tasks", "niah-single"])
    assert [str(spec) for spec in read(args).specs] == ["dense", "topk", "quest", "router", "router-on-quest", "auto"]
