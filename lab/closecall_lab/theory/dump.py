"""The diagnosis on disk: one Parquet file, a row for each (scorer, prompt, layer, head, tile), its facts in the schema.

Any Parquet reader opens it. Rows come in the order they were measured; nothing but the row group in hand is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..spine import files
from .cells import COLUMNS, Rows

SEMANTICS = 1  # of what the columns mean: raise it when a column's meaning changes
NAME = "diagnose.parquet"
KEY = b"closecall_diagnose"
_HELD = 1 << 24  # scores held before a row group is written, unless a single layer has more


def _pyarrow() -> Any:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.compute  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    return pyarrow


def _schema(pyarrow: Any) -> Any:
    fields = [pyarrow.field("scorer", pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))]
    fields += [
        pyarrow.field(name, getattr(pyarrow, kind)(), metadata={"is": text} if text else None)
        for name, (kind, text) in COLUMNS.items()
    ]
    return pyarrow.schema([*fields, pyarrow.field("scores", pyarrow.list_(pyarrow.float32()))])


class Writer:
    """Streams cells into a dump, which appears under its name when it is whole."""

    def __init__(self, path: str | Path, facts: dict[str, Any]) -> None:
        self.pa = _pyarrow()
        self.path = Path(path)
        self._closing = ExitStack()
        part = self._closing.enter_context(files.draft(self.path))
        about = json.dumps({"semantics": SEMANTICS} | facts)
        self._schema = _schema(self.pa).with_metadata({KEY: about.encode()})
        self._file = self.pa.parquet.ParquetWriter(part, self._schema, compression="zstd")
        self._waiting: list[tuple[str, int, int, Rows]] = []
        self._held = 0
        self.cells = 0

    def add(self, scorer: str, example: int, layer: int, rows: Rows) -> None:
        if self._held >= _HELD and self._waiting[-1][1:3] != (example, layer):
            self.flush()  # between layers only: what is said of a layer is computed a row group at a time
        self._waiting.append((scorer, example, layer, rows))
        self._held += rows.scores.numel()
        self.cells += len(rows.scores)

    def flush(self) -> None:
        """Writes what waits as one row group."""
        if not self._waiting:
            return
        pa, waiting = self.pa, self._waiting
        counts = [len(rows.scores) for *_, rows in waiting]
        made: dict[str, np.ndarray[Any, Any]] = {
            "example": np.repeat([e for _, e, _, _ in waiting], counts),
            "layer": np.repeat([n for _, _, n, _ in waiting], counts),
        }
        for name in COLUMNS:
            if name not in made:
                made[name] = np.concatenate([rows.columns[name].numpy() for *_, rows in waiting])
        arrays = [pa.array(np.repeat([s for s, *_ in waiting], counts)).dictionary_encode().cast(self._schema[0].type)]
        for field in list(self._schema)[1:-1]:
            values = made[field.name].astype(field.type.to_pandas_dtype())
            arrays.append(pa.array(values, type=field.type, mask=np.isnan(values)))
        broken = np.isnan(made["margin"])
        lengths = np.concatenate(
            [np.full(n, rows.scores.shape[1]) for n, (*_, rows) in zip(counts, waiting, strict=True)]
        )
        scores = np.concatenate([rows.scores.numpy().ravel() for *_, rows in waiting])
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(scores), mask=pa.array(broken)))
        self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._waiting, self._held = [], 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.close()
            self._closing.__exit__(kind, error, trace)
            return
        with self._closing:
            self.flush()
            self._file.close()


class Dump:
    """A dump to read. `facts` says what was diagnosed."""

    def __init__(self, path: str | Path) -> None:
        self.pa = _pyarrow()
        self.path = Path(path) / NAME if Path(path).is_dir() else Path(path)
        if not self.path.exists():
            raise ValueError(f"no dump at {self.path}: `closecall diagnose --out DIR` makes one")
        try:
            self._file = self.pa.parquet.ParquetFile(self.path)
        except self.pa.lib.ArrowInvalid as error:
            raise ValueError(f"{self.path} is not a Parquet file: {error}") from error
        about = (self._file.schema_arrow.metadata or {}).get(KEY)
        if about is None:
            raise ValueError(f"{self.path} is not a dump of `closecall diagnose`")
        self.facts: dict[str, Any] = json.loads(about)
        if self.facts.get("semantics") != SEMANTICS:
            raise ValueError(
                f"{self.path} was written with semantics {self.facts.get('semantics')!r}, and this closecall reads "
                f"{SEMANTICS}: diagnose again"
            )

    def columns(self, names: Sequence[str], scorer: str) -> dict[str, np.ndarray[Any, Any]]:
        """Columns of all cells of a scorer; nulls are NaN."""
        parts: list[dict[str, np.ndarray[Any, Any]]] = [
            {name: self._numbers(batch, name) for name in names} for batch in self._batches(scorer, list(names))
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def scores(self, scorer: str) -> Iterator[np.ndarray[Any, Any]]:
        """Row group by row group, the ranked scores of a scorer's cells `[n, widest]`, -inf past the end; NaN in all of
        the row of a cell that has none. In the order of `columns`."""
        for batch in self._batches(scorer, ["scores"]):
            lists = batch.column("scores").combine_chunks()
            lengths = lists.value_lengths().fill_null(0).to_numpy().astype(np.int64)
            found = np.full((len(lists), max(1, int(lengths.max(initial=0)))), -np.inf, dtype=np.float32)
            found[np.arange(found.shape[1]) < lengths[:, None]] = lists.flatten().to_numpy()
            found[lengths == 0] = np.nan
            yield found

    def _batches(self, scorer: str, names: list[str]) -> Iterator[Any]:
        for i in range(self._file.num_row_groups):
            group = self._file.read_row_group(i, columns=["scorer", *names])
            mine = self.pa.compute.equal(group.column("scorer"), scorer)
            group = group.filter(mine)
            if len(group):
                yield group

    @staticmethod
    def _numbers(batch: Any, name: str) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = batch.column(name).to_numpy()
        return found
