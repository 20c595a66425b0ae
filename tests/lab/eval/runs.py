"""Small grids, and results as tests compare them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from closecall_lab.eval.grid import Grid
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store

COMMAND = [sys.executable, "-c", "import sys; from closecall import cli; sys.exit(cli.main())", "eval"]
POLICIES = ("dense", "topk", "router", "router/random", "router/last", "router/matched")


def grid_of(tiny: Path, **changes: Any) -> Grid:
    plain: dict[str, Any] = {
        "models": (str(tiny),),
        "tasks": ("probe-needle", "probe-scattered:keys=8,questions=3"),
        "contexts": (512, 1000),
        "specs": tuple(Spec.parse(f"{name}:tile_factor=1" if name != "dense" else name) for name in POLICIES),
        "budgets": (5,),
        "n": 2,
    }
    return Grid(**(plain | changes))


def options(tiny: Path, store: Path, *more: str) -> list[str]:
    """What `grid_of` says, for the command line."""
    policies = ",".join(f"{name}:tile_factor=1" if name != "dense" else name for name in POLICIES)
    tasks = "probe-needle,probe-scattered:keys=8,questions=3"
    given = ["--model", str(tiny), "--tasks", tasks, "--contexts", "512,1000", "--policies", policies, "--budgets", "5"]
    return [*given, "--n", "2", "--store", str(store), *more]


def results(path: Path) -> list[tuple[Any, ...]]:
    """Every row without the times, which differ from run to run."""
    with Store(path, create=False) as store:
        rows = list(store.rows())
    collected = []
    for row in rows:
        run = dataclasses.asdict(row.run)
        del run["wall"], run["layers"]["prefill_seconds"]
        collected.append((row.key, row.cell, run))
    return collected
