"""Results in one SQLite file that any number of processes may write, and that loses nothing it has taken.

A run, one example under one policy, is stored under the sha256 of all that its answer depends on: the model's
fingerprint, the example's content, the policy and the version of our semantics. A cell is where a run stands in a grid
(task, context, seed, number, policy's name, budget); several cells may share a run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from closecall.registry import unknown

SCHEMA = 1
# Raise it when the same model, example and policy may give other results than before: old runs then no longer count.
SEMANTICS = 1
PATIENCE = 60.0  # seconds to wait for other writers, who hold the lock for milliseconds
_SQL = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS models (fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, facts TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY, semantics INTEGER NOT NULL, model TEXT NOT NULL, example TEXT NOT NULL, policy TEXT NOT NULL,
    score REAL NOT NULL, correct INTEGER NOT NULL, questions INTEGER NOT NULL, effective_budget REAL NOT NULL,
    kept_fraction REAL NOT NULL, prompt_tokens INTEGER NOT NULL, wall REAL NOT NULL,
    answers TEXT NOT NULL, layers TEXT NOT NULL, warnings TEXT NOT NULL, stored REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS cells (
    model TEXT NOT NULL, task TEXT NOT NULL, context INTEGER NOT NULL, seed INTEGER NOT NULL, number INTEGER NOT NULL,
    policy TEXT NOT NULL, budget INTEGER NOT NULL, key TEXT NOT NULL REFERENCES runs (key),
    PRIMARY KEY (model, task, context, seed, number, policy, budget)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS cells_by_policy ON cells (model, task, context, policy, budget, seed, number, key);
"""


class StoreError(OSError):
    """The store could not take a result: says why, and that what it has is safe."""


@dataclass(frozen=True, order=True)
class Cell:
    """A run's place in a grid. `budget` is 0 for a policy without one."""

    model: str  # the fingerprint
    task: str
    context: int
    seed: int
    number: int
    policy: str
    budget: int


@dataclass(frozen=True)
class Run:
    """What was measured. All values are JSON's; `answers` has one entry for each question."""

    model: str
    example: str
    policy: str
    score: float
    correct: int
    questions: int
    effective_budget: float
    kept_fraction: float
    prompt_tokens: int
    wall: float
    answers: list[dict[str, Any]]
    layers: dict[str, Any]
    warnings: list[str]

    @property
    def key(self) -> str:
        return address(self.model, self.example, self.policy)


class Kept(NamedTuple):
    """What a stored run kept: blocks a tile, of how many tokens, and blocks a tile of each question asked apart."""

    effective_budget: float
    prompt_tokens: int
    asked: tuple[float, ...] = ()

    @classmethod
    def of(cls, run: Run) -> Kept:
        return cls(run.effective_budget, run.prompt_tokens, _asked(run.answers))


def _asked(answers: list[dict[str, Any]]) -> tuple[float, ...]:
    return tuple(answer["asked_budget"] for answer in answers if "asked_budget" in answer)


@dataclass(frozen=True)
class Row:
    """A cell with its run, as reports and exports read it."""

    cell: Cell
    run: Run
    key: str


_RUN = tuple(f.name for f in dataclasses.fields(Run))
_CELL = tuple(f.name for f in dataclasses.fields(Cell))
_AS_JSON = ("answers", "layers", "warnings")


def address(model: str, example: str, policy: str) -> str:
    """The content address of a run: the model's fingerprint, the example's digest and the policy's JSON."""
    return hashlib.sha256(json.dumps([SEMANTICS, model, example, policy]).encode()).hexdigest()


class Store:
    """An open store. Also a context manager.

    With `create=False` it is there to be read: no byte of the file changes, and no file appears beside it (but SQLite's
    index of a log that a killed writer left without one).
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        self._stamp: tuple[int, int] | None = None  # of a file that must not change while it is read
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a directory: a store is one file")
        if not create and not self.path.exists():
            raise ValueError(f"no such store: {self.path}. `closecall eval --store {self.path} ...` makes one")
        with self._explained():
            self.connection = self._to_write() if create else self._to_read()
        try:
            with self._explained():
                tables = self._check_versions()
                if create:
                    self._prepare()
                elif not tables:
                    raise ValueError(f"{self.path} is not a store of results (it is empty): choose another file")
        except BaseException:
            self.connection.close()
            raise

    def _to_write(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)

    def _to_read(self) -> sqlite3.Connection:
        """Opens the file as it is.

        While somebody writes, or after a kill, the last results are in a log beside it, and SQLite reads both under its
        locks. Without a log the file is complete. SQLite would still make a log and an index of it, also to read only,
        unless it is told that the file never changes; `_undisturbed` sees to it that this was true.
        """
        file = self.path.resolve()  # a log lies beside the file, not beside a link to it
        stamp, log = _stamp(file), file.with_name(f"{file.name}-wal")
        logged = log.exists() and log.stat().st_size > 0
        self._stamp = None if logged else stamp
        uri = f"{file.as_uri()}?mode=ro{'' if logged else '&immutable=1'}"
        return sqlite3.connect(uri, timeout=PATIENCE, isolation_level=None, uri=True)

    def _prepare(self) -> None:
        for left in range(100, -1, -1):  # SQLite does not wait for its lock when the journal's kind changes
            try:
                self.connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if not left or "locked" not in str(error):
                    raise
                time.sleep(0.05)
        self.connection.execute("PRAGMA synchronous = FULL")  # an answer costs seconds, an fsync milliseconds
        with self._writing():
            for statement in filter(str.strip, _SQL.split(";")):
                self.connection.execute(statement)
            for name, value in (("schema", SCHEMA), ("semantics", SEMANTICS)):
                self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def _check_versions(self) -> set[str]:
        """The file's tables, if they are a store's and none is too new."""
        tables = {name for (name,) in self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "meta" not in tables:
            raise ValueError(f"{self.path} is a database of something else: choose another file")
        versions = dict(self.connection.execute("SELECT name, value FROM meta")) if tables else {}
        for name, ours in (("schema", SCHEMA), ("semantics", SEMANTICS)):
            if versions.get(name, 0) > ours:
                raise ValueError(
                    f"{self.path} was written by a newer closecall ({name} version {versions[name]}, ours is {ours}): "
                    "upgrade closecall, or use another store"
                )
        return tables

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's complaints in our words."""
        safe = "what is stored is safe, and the same command goes on from there"
        try:
            with self._undisturbed():
                yield
        except sqlite3.OperationalError as error:
            text = str(error)
            if "full" in text:
                raise StoreError(f"the disk of {self.path} is full: make room; {safe}") from error
            if "locked" in text:
                raise StoreError(
                    f"{self.path} stayed locked for {PATIENCE:g} s: another process hangs; {safe}"
                ) from error
            raise StoreError(f"{self.path} cannot be used ({text}): check the disk and permissions; {safe}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path} is not a store of results ({error}): choose another file") from error
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self.path} cannot be used: {error.strerror or error}") from error

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """What was read without locks counts only if nobody wrote into the file meanwhile."""
        try:
            yield
        finally:
            if self._stamp is not None and self._stamp != _stamp(self.path):
                raise StoreError(f"{self.path} was written while it was read: run the same command again")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction, taken at its start so that two writers never wait for each other's reads."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    # -- writing -------------------------------------------------------------------------------------------------------

    def add_model(self, fingerprint: str, name: str, facts: dict[str, Any]) -> None:
        with self.transaction():
            values = (fingerprint, name, _dump(facts))
            self.connection.execute("INSERT OR REPLACE INTO models VALUES (?, ?, ?)", values)

    def add(self, cell: Cell, run: Run) -> None:
        """Takes a result, for good once this returns. The same run again changes nothing."""
        with self.transaction():
            self.put(cell, run)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is `put` inside is taken together, or nothing of it."""
        with self._explained(), self._writing():
            yield

    def put(self, cell: Cell, run: Run) -> None:
        """`add` within a transaction."""
        given = {name: getattr(run, name) for name in _RUN}
        values = [_dump(value) if name in _AS_JSON else value for name, value in given.items()]
        marks = ", ".join("?" * (len(_RUN) + 3))
        self.connection.execute(
            f"INSERT OR IGNORE INTO runs (key, semantics, stored, {', '.join(_RUN)}) VALUES ({marks})",
            [run.key, SEMANTICS, time.time(), *values],
        )
        self._place(cell, run.key)

    def link(self, cell: Cell, key: str) -> None:
        """Puts a stored run into a cell."""
        with self.transaction():
            self._place(cell, key)

    def _place(self, cell: Cell, key: str) -> None:
        marks = ", ".join("?" * (len(_CELL) + 1))
        self.connection.execute(f"INSERT OR REPLACE INTO cells VALUES ({marks})", [*dataclasses.astuple(cell), key])

    # -- reading -------------------------------------------------------------------------------------------------------

    def known(self, model: str, task: str, context: int, seed: int, number: int) -> dict[str, Kept]:
        """The runs of an example that are stored, by their keys, and what each one kept."""
        query = (
            "SELECT key, effective_budget, prompt_tokens, answers FROM cells JOIN runs USING (key) "
            "WHERE cells.model = ? AND task = ? AND context = ? AND seed = ? AND number = ? AND semantics = ?"
        )
        with self._explained():
            found = self.connection.execute(query, (model, task, context, seed, number, SEMANTICS)).fetchall()
        return {key: Kept(budget, tokens, _asked(json.loads(answers))) for key, budget, tokens, answers in found}

    def models(self) -> dict[str, dict[str, Any]]:
        """Returns every model's name and what is known of it, by fingerprint."""
        with self._explained():
            found = self.connection.execute("SELECT fingerprint, name, facts FROM models").fetchall()
        return {fingerprint: {"name": name, **json.loads(facts)} for fingerprint, name, facts in found}

    def rows(self, **where: str | int | None) -> Iterator[Row]:
        """Cells with their runs, of this semantics version, in a fixed order; `where` are fields of a cell, or None."""
        query, values = _select(**where)
        width = len(_CELL)
        with self._explained():
            for found in self.connection.execute(query, values):
                fields = dict(zip(_RUN, found[width + 1 :], strict=True))
                fields |= {name: json.loads(fields[name]) for name in _AS_JSON}
                yield Row(Cell(*found[:width]), Run(**fields), found[width])

    def cells(self, *, seed: int | None = None, below: int | None = None) -> list[Cell]:
        """The cells of this semantics version by model, task and context, without their runs; of one seed, and of
        examples below a number, if given."""
        named = ", ".join(f"cells.{name}" for name in _CELL)
        given = {"seed = ?": seed, "number < ?": below}
        wanted = {condition: value for condition, value in given.items() if value is not None}
        query = f"SELECT {named} FROM cells JOIN runs USING (key) WHERE {' AND '.join(['semantics = ?', *wanted])}"
        with self._explained():
            found = self.connection.execute(
                f"{query} ORDER BY cells.model, task, context", [SEMANTICS, *wanted.values()]
            )
            return [Cell(*row) for row in found]

    def count(self) -> int:
        with self._explained():
            return int(self.connection.execute("SELECT count(*) FROM cells").fetchone()[0])


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size


def _select(**where: str | int | None) -> tuple[str, list[str | int]]:
    for name in where:
        if name not in _CELL:
            raise unknown("field of a cell", name, _CELL)
    chosen = {name: value for name, value in where.items() if value is not None}
    columns = [*(f"cells.{c}" for c in _CELL), "cells.key", *(f"runs.{c}" for c in _RUN)]
    conditions = [f"runs.semantics = {SEMANTICS}", *(f"cells.{name} = ?" for name in chosen)]
    # CROSS JOIN fixes the order: first the cells, by index, then each one's run by its key.
    query = (
        f"SELECT {', '.join(columns)} FROM cells CROSS JOIN runs ON runs.key = cells.key "
        f"WHERE {' AND '.join(conditions)} ORDER BY {', '.join(columns[: len(_CELL)])}"
    )
    return query, list(chosen.values())


def _dump(value: dict[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
