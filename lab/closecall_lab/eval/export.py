"""The store as JSON, CSV or Parquet: one row for each question, everything that was measured."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from closecall.registry import unknown

from ..spine import files
from .store import Row, Store

FORMATS = ("csv", "json", "parquet")
# Every column with its type in Parquet, so that a file has the same columns whatever its rows are.
COLUMNS = {
    "model_name": "string", "model": "string", "task": "string", "context": "int64", "seed": "int64",
    "number": "int64", "question": "int64", "policy": "string", "budget": "int64", "score": "float64",
    "correct": "bool_", "output": "string", "choice": "string", "choice_correct": "bool_", "unformatted": "bool_",
    "asked_triggered": "float64", "asked_budget": "float64", "hit": "float64", "hit_union": "float64",
    "effective_budget": "float64", "kept_fraction": "float64", "prompt_tokens": "int64", "questions": "int64",
    "wall": "float64", "prefill_seconds": "float64", "policy_json": "string", "example": "string", "key": "string",
    "layers": "string", "warnings": "string", "positions": "int64", "kl": "float64", "loss": "float64",
    "dense_loss": "float64", "agreement": "float64",
}  # fmt: skip


def flat(store: Store, **where: Any) -> Iterator[dict[str, Any]]:
    """Yields a dictionary for each question. `layers` and `warnings` stay JSON text; what a task lacks is None."""
    names = {fingerprint: facts["name"] for fingerprint, facts in store.models().items()}
    for row in store.rows(**where):
        for question in range(len(row.run.answers)):
            values = _flat(row, question) | {"model_name": names.get(row.cell.model)}
            yield {column: values.get(column) for column in COLUMNS}


def _flat(row: Row, question: int) -> dict[str, Any]:
    layers = dict(row.run.layers)
    run = {name: getattr(row.run, name) for name in ("example", "questions", "effective_budget", "kept_fraction")}
    run |= {"prompt_tokens": row.run.prompt_tokens, "wall": row.run.wall, "policy_json": row.run.policy}
    run |= {"prefill_seconds": layers.pop("prefill_seconds", None), "key": row.key, "question": question}
    texts = {"layers": json.dumps(layers), "warnings": json.dumps(row.run.warnings)}
    return vars(row.cell) | run | texts | row.run.answers[question]


def check_kind(path: Path) -> str:
    """The format that a file's ending names, if it can be written here."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise unknown("ending of an export", path.suffix or str(path), [f".{f}" for f in FORMATS])
    if kind == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet needs pyarrow, which is not installed: pip install ./lab, or export .csv")
    return kind


def export(store: Store, path: str | Path, **where: Any) -> int:
    """Writes the rows to a file of the kind its ending says, and returns their number. The file appears when whole."""
    target = Path(path)
    kind = check_kind(target)
    with files.draft(target) as part:
        return {"csv": _csv, "json": _json, "parquet": _parquet}[kind](flat(store, **where), part)


def _csv(rows: Iterator[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(COLUMNS))
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            count += 1
    return count


def _json(rows: Iterator[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        for row in rows:
            file.write((",\n" if count else "\n") + json.dumps(row))
            count += 1
        file.write("\n]\n")
    return count


def _parquet(rows: Iterator[dict[str, Any]], path: Path) -> int:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    schema = pyarrow.schema([(column, getattr(pyarrow, kind)()) for column, kind in COLUMNS.items()])
    table = pyarrow.Table.from_pylist(list(rows), schema=schema)
    parquet.write_table(table, path)
    return int(table.num_rows)
