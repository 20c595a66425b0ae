"""Panels run, stop, are killed, go on, and grow; every way of running gives the same results."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import COMMAND, grid_of, options, results

from closecall import cli
from closecall_lab.eval import executors, kinds, runner
from closecall_lab.eval.grid import Grid
from closecall_lab.eval.matched import TOLERANCE
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store

pytestmark = pytest.mark.usefixtures("fewer_draws")

CELLS = 2 * 2 * 2 * 6


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The grid, run without a break in this process."""
    path = tmp_path_factory.mktemp("whole") / "results.db"
    with Store(path) as store:
        runner.run(grid_of(tiny), store)
    return path


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("this was measured already")

    monkeypatch.setattr(kinds, "measure", fail)


def test_every_cell_is_filled_with_the_same_examples(whole: Path) -> None:
    rows = results(whole)
    assert len(rows) == CELLS
    examples: dict[tuple[str, int, int], set[str]] = {}
    for _, cell, run in rows:
        examples.setdefault((cell.task, cell.context, cell.number), set()).add(run["example"])
    assert {len(found) for found in examples.values()} == {1}
    assert len({example for found in examples.values() for example in found}) == 8


def test_the_matched_control_keeps_what_the_router_kept(whole: Path) -> None:
    budgets = {(c.policy, c.task, c.context, c.number): run["effective_budget"] for _, c, run in results(whole)}
    routers = {key[1:]: value for key, value in budgets.items() if key[0] == "router:tile_factor=1"}
    assert len(routers) == 8
    for key, spent in routers.items():
        kept = budgets[("router/matched:tile_factor=1", *key)]
        tiles = -(-key[1] // 64)
        assert abs(kept - spent) <= max(TOLERANCE * spent, 0.5 / tiles)  # whole blocks allow no better on 8 tiles


def test_the_same_command_again_measures_nothing(whole: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = results(whole)
    forbid(monkeypatch)
    with Store(whole) as store:
        runner.run(grid_of(tiny), store)
    assert results(whole) == before


def test_a_larger_grid_measures_only_what_is_new(
    whole: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grown.db"
    with Store(whole) as source, Store(path) as store:
        source.connection.backup(store.connection)
    made: list[str] = []
    true = kinds.measure

    def count(*args: object) -> object:
        made.append(args[3].to_json())  # type: ignore[attr-defined]
        return true(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(kinds, "measure", count)
    grown = grid_of(tiny, n=3, specs=(*grid_of(tiny).specs, Spec.parse("quest:tile_factor=1")))
    with Store(path) as store:
        runner.run(grown, store)
        assert store.count() == 2 * 2 * 3 * 7
    assert len(made) == 2 * 2 * (3 * 7 - 2 * 6)


def test_a_stopped_run_is_balanced(tiny: Path, tmp_path: Path) -> None:
    class TiredError(Exception):
        pass

    class Some(executors.Local):
        """Gives up in the middle of the second example."""

        def run(self, jobs: Iterator[executors.Job]) -> Iterator[executors.Result]:
            for i, result in enumerate(super().run(jobs)):
                if i == 4 * 6 + 9:
                    raise TiredError
                yield result

    with Store(tmp_path / "results.db") as store:
        workers = Some(str(tiny))
        with pytest.raises(TiredError):
            runner.run_model(grid_of(tiny), store, workers)
    rows = results(tmp_path / "results.db")
    assert len(rows) == 4 * 6 + 9
    cells = Counter((c.task, c.context, c.policy) for _, c, _ in rows)
    assert set(cells.values()) == {1, 2}
    assert len(cells) == 24


def test_kill_9_and_the_same_command_again(whole: Path, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "killed.db"
    with subprocess.Popen(
        [*COMMAND, *options(tiny, path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        count = wait_for_rows(path, 5)
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    there = results(path)
    assert count <= len(there) < CELLS
    assert cli.main(["eval", *options(tiny, path)]) == 0
    assert results(path) == results(whole)
    with Store(path) as store:
        assert store.connection.execute("SELECT count(*) FROM runs").fetchone() == (CELLS,)


def wait_for_rows(path: Path, least: int) -> int:
    while True:
        if path.exists():
            try:
                with Store(path, create=False) as store:
                    if (count := store.count()) >= least:
                        return count
            except (OSError, ValueError):  # not made yet, or empty
                pass
        time.sleep(0.02)


@pytest.mark.parametrize(("jobs", "ending"), [("1", signal.SIGTERM), ("2", signal.SIGINT)], ids=str)
def test_ctrl_c_and_kill_say_how_to_go_on(tiny: Path, tmp_path: Path, jobs: str, ending: signal.Signals) -> None:
    path = tmp_path / "stopped.db"
    # A shell starts background jobs with Ctrl-C ignored, and the tests may be one.
    heeding = COMMAND[2].replace("import sys;", "import signal, sys; signal.signal(2, signal.default_int_handler);")
    arguments = [*COMMAND[:2], heeding, *COMMAND[3:], *options(tiny, path, "--jobs", jobs, "--n", "1000")]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        wait_for_rows(path, 3)
        # A terminal's Ctrl-C reaches the workers too, `kill PID` the parent alone.
        (os.killpg if ending == signal.SIGINT else os.kill)(run.pid, ending)
        _, errors = run.communicate()
    assert run.returncode == 130
    assert "interrupted; finished runs are in" in errors
    assert "the same command goes on from there" in errors
    assert "Traceback" not in errors
    assert len(results(path)) >= 3


def test_a_worker_whose_results_are_not_read_ends_without_a_word(tiny: Path) -> None:
    """Ctrl-C closes the driver's end of the pipe; what was in it unread then reaches the worker as another error."""
    workers = executors.Processes(str(tiny), jobs=1)
    ((pipe, process),) = workers.processes.items()
    pipe.send(grid_of(tiny, specs=(Spec("dense"),)).jobs()[0])
    assert pipe.poll(60)
    time.sleep(0.5)  # until it waits for the next job
    pipe.close()
    process.join(60)
    assert process.exitcode == 0


def test_no_worker_outlives_its_parent() -> None:
    """Not even a killed one, which cannot tell its workers: they hold gigabytes, and may compute for minutes."""
    script = [sys.executable, str(Path(__file__).with_name("endless.py"))]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "at work\n"
            run.kill()
            assert run.communicate(timeout=60) == ("", None)  # the end of the file: nobody holds its other end
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def test_two_processes_give_the_same_and_tell_what_goes_wrong_in_them(whole: Path, tiny: Path, tmp_path: Path) -> None:
    """One after the other on the same two processes, which take longer to start than to do all of it."""
    grid, workers = grid_of(tiny), executors.Processes(str(tiny), jobs=2)
    with Store(tmp_path / "two.db") as store:
        runner.run_model(grid, store, workers, jobs=2)
    assert results(tmp_path / "two.db") == results(whole)

    too_short = grid_of(tiny, contexts=(16,), tasks=("probe-needle",), n=1)  # no room for a single needle
    with Store(tmp_path / "none.db") as store, pytest.raises(ValueError, match="at least 102 tokens, got 16"):
        runner.run_model(too_short, store, workers)
    workers.processes.pop(next(iter(workers.processes))).join()  # the first one got the only job, and ended with it

    def jobs_then_kill() -> Iterator[executors.Job]:
        for i, job in enumerate(grid.jobs()):
            if i == 3:
                next(iter(workers.processes.values())).kill()
            yield job

    with Store(tmp_path / "died.db") as store:
        model = workers.identity()
        found = []
        with pytest.raises(executors.WorkerError, match="a worker process ended with code -9; what is stored is safe"):
            found.extend(take(workers.run(jobs_then_kill()), store, model.fingerprint))
        assert len(found) == 3 * 6
        workers.close()
        runner.run(grid, store)
    assert results(tmp_path / "died.db") == results(whole)


def take(stream: Iterator[executors.Result], store: Store, model: str) -> Iterator[executors.Result]:
    for result in stream:
        job = result.job
        assert result.run is not None
        cell = runner.Cell(model, job.task, job.context, job.seed, job.number, str(result.spec), result.budget)
        store.add(cell, result.run)
        yield result


def test_a_task_with_fewer_examples_than_asked_for(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = executors.Worker(str(tiny))
    task = worker._task("probe-needle")
    few = list(itertools.islice(task.examples(512, 0), 2))

    class Few:
        def examples(self, *_: object, **__: object) -> Iterator[object]:
            return iter(few)

    monkeypatch.setitem(worker._tasks, "few", Few())
    jobs = [executors.Job("few", 512, 0, n, ()) for n in (0, 1, 2, 3, 1, 1, 0)]
    assert [worker.example(job) for job in jobs] == [few[0], few[1], None, None, few[1], few[1], few[0]]


def test_contexts_longer_than_trained_are_warned_of(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    one = grid_of(tiny, contexts=(512, 1100), n=1, tasks=("probe-needle",), specs=(Spec("dense"),))
    with Store(tmp_path / "results.db") as store:
        runner.run(one, store, say=said.append)
        rows = list(store.rows(context=1100))
    assert len(said) == 1
    assert said[0] == "warning: tiny was trained for 1024 tokens: at 1100 it may fail whatever the policy"
    assert "1100 tokens are more than the 1024" in rows[0].run.warnings[0]


def test_wrong_executors(tiny: Path) -> None:
    with pytest.raises(ValueError, match="unknown executor 'rey': did you mean 'ray'"):
        executors.start("rey", str(tiny))
    with pytest.raises(ValueError, match="jobs must be a number of workers, at least 1, got 0"):
        executors.start("local", str(tiny), jobs=0)
    with pytest.raises(ValueError, match="--address is a Ray cluster's: it needs --executor ray"):
        executors.start("local", str(tiny), address="somewhere:6379")


def test_unknown_tasks_are_found_before_a_model_is_loaded() -> None:
    with pytest.raises(ValueError, match="did you mean 'probe-needle'"):
        Grid(("no/such/model",), ("probe-needel",), (512,), (Spec("dense"),), (5,), 1)
