"""Rows of a data set: from a local file, or from the hub, through the `datasets` library."""

from __future__ import annotations

import importlib
import importlib.util
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from closecall.models.cache import UnavailableError

# The hub's LongBench v1 is a zip with a loading script, which `datasets` no longer runs: its member is read directly.
HUB_V1 = "THUDM/LongBench"
HUB_V2 = "THUDM/LongBench-v2"
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


class Rows:
    """The rows of one source, and the names of its columns."""

    def __init__(self, source: str, table: Any) -> None:
        self.source = source
        self.columns: tuple[str, ...] = tuple(table.column_names)
        self._table = table

    def need(self, columns: Iterable[str]) -> None:
        missing = [name for name in columns if name not in self.columns]
        if missing:
            raise ValueError(
                f"{self.source} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
                f"it has {', '.join(self.columns) or 'none'}"
            )

    def column(self, name: str) -> list[Any]:
        """One column, without reading the others: documents are long."""
        return list(self._table[name])

    def __getitem__(self, i: int) -> dict[str, Any]:
        row: dict[str, Any] = self._table[i]
        return row

    def __len__(self) -> int:
        return len(self._table)


def rows(data: str, columns: Iterable[str], *, member: str = "") -> Rows:
    """All rows of `data`, a local file or a data set's name on the hub, which must have these columns.

    `member` is the file to take out of a zip; the hub's LongBench v1 is one.
    """
    path = Path(data).expanduser()
    library = _datasets()
    if path.is_file():
        if path.suffix == ".zip" and member:
            return _of_zip(library, data, path, member, columns)
        where, kind = str(path), FORMATS.get(path.suffix)
        if kind is None:
            raise ValueError(f"{data} is none of the files that can be read: {', '.join([*FORMATS, '.zip'])}")
        options: dict[str, Any] = {"path": kind, "data_files": where}
    elif path.suffix in (*FORMATS, ".zip") or path.is_absolute() or data.count("/") != 1:
        raise ValueError(f"no such data file: {data}. Name a file, or a data set on the hub like {HUB_V2}")
    elif member:
        options = {"path": "json", "data_files": f"zip://{member}::hf://datasets/{data}/data.zip"}
    else:
        options = {"path": data}
    found = Rows(data, _load(library, data, options))
    found.need(columns)
    return found


def _of_zip(library: Any, data: str, path: Path, member: str, columns: Iterable[str]) -> Rows:
    """The rows of JSON lines in a local archive, which `datasets` would take for a remote one when offline."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as lines:
            listed = [json.loads(line) for line in lines if line.strip()]
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{data} cannot be read: {error}") from error
    table = Rows(data, library.Dataset.from_list(listed))
    table.need(columns)
    return table


def _load(library: Any, data: str, options: dict[str, Any]) -> Any:
    local = Path(data).expanduser().is_file()
    try:
        splits = library.load_dataset(**options)
    except Exception as error:  # the library's own kinds are many, and wrap one another
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        if local:
            raise ValueError(f"{data} cannot be read: {reason[0]}") from error
        raise UnavailableError(
            f"the data set {data} could not be had from the hub: {reason[0]}. Check the name and the network, or fetch "
            f"its file elsewhere and pass data=FILE"
        ) from error
    return splits[next(iter(splits))]


def _datasets() -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise UnavailableError("reading a data set needs the datasets package: pip install ./lab")
    return importlib.import_module("datasets")
