"""The store: content-addressed, safe for several writers, and nothing lost by a kill or a full disk."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from closecall_lab.eval import store as module
from closecall_lab.eval.store import Cell, Kept, Run, Store, StoreError, address


def run_of(example: str = "e0", policy: str = "{}", model: str = "m", **fields: Any) -> Run:
    plain: dict[str, Any] = {
        "score": 1.0, "correct": 1, "questions": 1, "effective_budget": 7.5, "kept_fraction": 0.5, "prompt_tokens": 100,
        "wall": 0.25, "answers": [{"score": 1.0, "correct": True, "output": "blue é"}], "layers": {"layer": [0]},
        "warnings": [],
    }  # fmt: skip
    return Run(model=model, example=example, policy=policy, **(plain | fields))


def cell_of(number: int = 0, policy: str = "topk", budget: int = 8, task: str = "needle") -> Cell:
    return Cell("m", task, 1024, 0, number, policy, budget)


def add_all(store: Store, listed: list[tuple[Cell, Run]]) -> None:
    for cell, run in listed:
        store.add(cell, run)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "results.db"


def test_what_goes_in_comes_out(path: Path) -> None:
    run, cell = run_of(warnings=["too long"]), cell_of()
    with Store(path) as store:
        store.add_model("m", "tiny", {"context": 512})
        store.add(cell, run)
    with Store(path, create=False) as store:
        (row,) = store.rows()
        assert (row.cell, row.run, row.key) == (cell, run, run.key)
        assert store.models() == {"m": {"name": "tiny", "context": 512}}
        assert store.known("m", "needle", 1024, 0, 0) == {run.key: Kept(7.5, 100)}
        assert store.known("m", "needle", 1024, 0, 1) == {}


def test_the_address_depends_on_everything() -> None:
    parts = [("m", "e", "p"), ("n", "e", "p"), ("m", "f", "p"), ("m", "e", "q"), ("m", "ep", "")]
    assert len({address(*p) for p in parts}) == 5
    assert run_of().key == address("m", "e0", "{}")


def test_the_address_depends_on_the_semantics(monkeypatch: pytest.MonkeyPatch) -> None:
    before = address("m", "e", "p")
    monkeypatch.setattr(module, "SEMANTICS", module.SEMANTICS + 1)
    assert address("m", "e", "p") != before


def test_the_same_run_is_taken_once(path: Path) -> None:
    with Store(path) as store:
        store.add(cell_of(), run_of(wall=1.0))
        store.add(cell_of(), run_of(wall=2.0))
        store.add(cell_of(policy="topk:tile_factor=2"), run_of())
        assert [row.run.wall for row in store.rows()] == [1.0, 1.0]
        assert store.connection.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_a_cell_whose_example_changed_gets_the_new_run_and_the_old_one_stays(path: Path) -> None:
    with Store(path) as store:
        store.add(cell_of(), run_of("old"))
        store.add(cell_of(), run_of("new"))
        assert [row.run.example for row in store.rows()] == ["new"]
        assert store.connection.execute("SELECT count(*) FROM runs").fetchone() == (2,)


def test_runs_of_older_semantics_do_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        store.add(cell_of(), run_of())
    monkeypatch.setattr(module, "SEMANTICS", module.SEMANTICS + 1)
    with Store(path) as store:
        assert list(store.rows()) == []
        assert store.known("m", "needle", 1024, 0, 0) == {}


def test_reading_makes_no_store_of_an_empty_file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ValueError, match=r"is not a store of results \(it is empty\)"):
        Store(path, create=False)
    assert path.stat().st_size == 0


def read(path: Path) -> None:
    """Reads all there is, with nothing beside the file at any time."""
    there = sorted(path.parent.iterdir())
    with Store(path, create=False) as store:
        assert [row.run for row in store.rows()] == [run_of()]
        assert store.count() == 1
        assert store.models() == {"m": {"name": "tiny"}}
        assert sorted(path.parent.iterdir()) == there
    assert sorted(path.parent.iterdir()) == there


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_reading_leaves_the_file_as_it_is(path: Path, journal: str) -> None:
    """Also where nothing may be written: a file and a directory to read only."""
    with Store(path) as store:
        store.add_model("m", "tiny", {})
        store.add(cell_of(), run_of())
        assert store.connection.execute(f"PRAGMA journal_mode = {journal}").fetchone() == (journal.lower(),)
    before = path.read_bytes()
    read(path)
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        read(path)
    finally:
        path.parent.chmod(0o755)
    assert path.read_bytes() == before


def test_reading_sees_what_another_process_writes(path: Path) -> None:
    with Store(path) as writer:
        writer.add_model("m", "tiny", {})
        writer.add(cell_of(), run_of())
        before = path.read_bytes()
        read(path)  # the writer's log is beside the file already
        with Store(path, create=False) as store:
            writer.add(cell_of(1), run_of("e1"))
            assert store.count() == 2
        assert path.read_bytes() == before


def test_reading_says_so_if_the_file_changes_meanwhile(path: Path) -> None:
    with Store(path) as writer:
        writer.add(cell_of(), run_of())
    with Store(path, create=False) as store:
        assert store.count() == 1
        with Store(path) as writer:
            writer.add(cell_of(1), run_of("e1"))
            assert store.count() == 1  # in the log: the file itself is as it was
        with pytest.raises(StoreError, match="was written while it was read: run the same command again"):
            store.count()


def test_reading_after_kill_9_leaves_the_log_to_the_next_writer(path: Path) -> None:
    script = """
        import os, signal, sys
        from closecall_lab.eval.store import Store
        from test_store import cell_of, run_of
        store = Store(sys.argv[1])
        store.add_model("m", "tiny", {})
        store.add(cell_of(), run_of())
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(script, path).returncode == -signal.SIGKILL
    before = path.read_bytes()
    read(path)
    assert path.read_bytes() == before
    Store(path).close()
    assert list(path.parent.iterdir()) == [path]
    read(path)


def test_a_store_to_read_takes_nothing(path: Path) -> None:
    Store(path).close()
    with Store(path, create=False) as store, pytest.raises(StoreError, match="readonly"):
        store.add(cell_of(), run_of())


@pytest.mark.parametrize("name", ["schema", "semantics"])
def test_a_store_of_a_newer_version_is_refused(path: Path, name: str) -> None:
    with Store(path) as store:
        store.add(cell_of(), run_of())
        store.connection.execute("UPDATE meta SET value = 99 WHERE name = ?", (name,))
    with pytest.raises(ValueError, match=f"newer closecall \\({name} version 99, ours is 1\\): upgrade closecall"):
        Store(path)
    plain = sqlite3.connect(path)
    assert plain.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone() == (99,)
    plain.close()


def test_files_that_are_no_store(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("nothing of the kind " * 100)
    with pytest.raises(ValueError, match=r"notes.txt is not a store of results"):
        Store(text)
    assert text.read_text().startswith("nothing")
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE people (name TEXT)")
    connection.close()
    with pytest.raises(ValueError, match="is a database of something else"):
        Store(other)
    with pytest.raises(ValueError, match="is a directory"):
        Store(tmp_path)
    with pytest.raises(ValueError, match="no such store"):
        Store(tmp_path / "missing.db", create=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "file" / "results.db")


def test_not_a_number_is_refused_before_it_is_stored(path: Path) -> None:
    with Store(path) as store, pytest.raises(ValueError, match="not JSON compliant"):
        store.add(cell_of(), run_of(layers={"hit": float("nan")}))


def test_a_full_disk_says_so_and_loses_nothing(path: Path) -> None:
    with Store(path) as store:
        store.add(cell_of(0), run_of("e0"))
        pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
        store.connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        large = [(cell_of(i), run_of(f"e{i}", layers={"filler": "x" * 4000})) for i in range(1, 1000)]
        with pytest.raises(StoreError, match=r"disk of .*results.db is full: make room; what is stored is safe"):
            add_all(store, large)
        written = store.count()
        assert 1 < written < 1000
    with Store(path) as store:  # room again
        assert [row.cell.number for row in store.rows()] == list(range(written))
        store.add(cell_of(written), run_of(f"e{written}"))
        assert store.count() == written + 1
        assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_disk_that_refuses_to_write(path: Path) -> None:
    """A real one: the process may not make files larger than a megabyte."""
    script = """
        import resource, sys
        from closecall_lab.eval.store import Store, StoreError
        from test_store import cell_of, run_of
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        with Store(sys.argv[1]) as store:
            for i in range(1000):
                try:
                    store.add(cell_of(i), run_of(f"e{i}", layers={"filler": "x" * 20000}))
                except StoreError as error:
                    print(i, error)
                    break
    """
    done = python(script, path)
    number, _, message = done.stdout.partition(" ")
    assert "what is stored is safe" in message, done.stderr
    with Store(path) as store:
        assert [row.cell.number for row in store.rows()] == list(range(int(number)))


def python(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def _write(path: Path, first: int, count: int) -> None:
    with Store(path) as store:
        for i in range(first, first + count):
            store.add(cell_of(i), run_of(f"e{i}"))


def test_two_processes_write_at_once(path: Path) -> None:
    """Both make the store, both write 150 runs, 100 of them the same."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, first, 150)) for first in (0, 50)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    with Store(path) as store:
        assert [row.cell.number for row in store.rows()] == list(range(200))
        assert store.connection.execute("SELECT count(*) FROM runs").fetchone() == (200,)


def test_kill_9_loses_nothing_that_was_taken(path: Path) -> None:
    """The writer tells each run once it is stored; all it told is there after it was killed."""
    script = """
        import sys
        from closecall_lab.eval.store import Store
        from test_store import cell_of, run_of
        store = Store(sys.argv[1])
        for i in range(10**9):
            store.add(cell_of(i), run_of(f"e{i}"))
            print(i, flush=True)
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 20:
            pass
        time.sleep(0.01)  # into the middle of something
        writer.send_signal(signal.SIGKILL)
        told = [int(line) for line in writer.stdout.read().splitlines()]
    assert writer.returncode == -signal.SIGKILL
    last = max([20, *told])
    with Store(path) as store:
        there = [row.cell.number for row in store.rows()]
        assert there in (list(range(last + 1)), list(range(last + 2)))  # the one in flight may have made it
        assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred thousand rows, in one transaction."""
    path = tmp_path_factory.mktemp("large") / "results.db"
    with Store(path) as store:
        store.connection.execute("BEGIN")
        run = dataclasses.asdict(run_of())
        names = ", ".join(run)
        values = ["[]" if isinstance(v, (list, dict)) else v for v in run.values()]
        marks = ", ".join("?" * (len(values) + 3))
        for i in range(100_000):
            store.connection.execute(
                f"INSERT INTO runs (key, semantics, stored, {names}) VALUES ({marks})", [f"k{i}", 1, 0.0, *values]
            )
            cell = (f"m{i % 4}", f"t{i % 5}", 1024 * (1 + i % 3), 0, i // 600, f"p{i % 10}", i % 2)
            store.connection.execute("INSERT OR REPLACE INTO cells VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*cell, f"k{i}"))
        store.connection.execute("COMMIT")
    return path


@pytest.mark.parametrize(
    "where",
    [
        {"model": "m1"},
        {"model": "m1", "task": "t1"},
        {"model": "m1", "task": "t1", "context": 2048},
        {"model": "m1", "task": "t1", "context": 2048, "policy": "p1", "budget": 1},
    ],
    ids=lambda w: "+".join(w),
)
def test_queries_read_an_index_and_no_more(large: Path, where: dict[str, Any]) -> None:
    with Store(large) as store:
        query, values = module._select(**where)
        steps = [row[3] for row in store.connection.execute(f"EXPLAIN QUERY PLAN {query}", values)]
        assert steps[0].startswith(("SEARCH cells USING PRIMARY KEY (model=?", "SEARCH cells USING COVERING INDEX"))
        used = steps[0].partition("(")[2]
        assert all(f"{name}=?" in used for name in where)
        assert steps[1].startswith("SEARCH runs USING INDEX sqlite_autoindex_runs_1 (key=?)")
        assert not any("SCAN" in step for step in steps)


def test_asking_what_is_known_reads_an_index(large: Path) -> None:
    seen: list[str] = []
    with Store(large) as store:
        store.connection.set_trace_callback(seen.append)
        store.known("m1", "t1", 2048, 0, 3)
        store.connection.set_trace_callback(None)
        steps = [row[3] for row in store.connection.execute(f"EXPLAIN QUERY PLAN {seen[0]}")]
    assert "PRIMARY KEY (model=? AND task=? AND context=? AND seed=? AND number=?" in steps[0]
    assert not any("SCAN" in step for step in steps)
