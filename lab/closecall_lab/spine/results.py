"""Finished cells on disk, one JSON file per benchmark, written after every cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import files

Facts = dict[str, Any]  # JSON values only
Measured = list[tuple[Facts, Facts]]  # cells with their results


class Store:
    """Records `{"machine", "cell", "result"}`. Those of other machines, versions and settings stay beside ours."""

    def __init__(self, path: Path, *, fresh: bool = False, remedy: str = "start over with --fresh") -> None:
        self.path = path
        self.records: list[Facts] = []
        if path.is_dir():
            raise ValueError(f"{path} is a directory, and a file of benchmark results is wanted: name one in it")
        if path.exists() and not fresh:
            try:
                self.records = json.loads(path.read_text())["records"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a file of benchmark results: {remedy}") from error

    def find(self, machine: Facts, cell: Facts) -> Facts | None:
        """The result of this cell on this machine."""
        matching = (r["result"] for r in self.records if r["machine"] == machine and r["cell"] == cell)
        return next(matching, None)

    def add(self, machine: Facts, cell: Facts, result: Facts) -> None:
        self.records.append({"machine": machine, "cell": cell, "result": result})
        files.write(self.path, json.dumps({"records": self.records}, indent=1) + "\n")
