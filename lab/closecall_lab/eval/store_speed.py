"""How fast the store is: `python -m closecall_lab.eval.store_speed` fills one in a temporary directory and times it."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import summary
from .export import export
from .spec import DEFAULT, Spec
from .store import Cell, Run, Store

LAYERS = 24
CONTEXTS = (8192, 16384, 32768)
TASKS = ("one", "two", "three", "four")


def _run(number: int, policy: str, context: int) -> Run:
    """About as large as a real run of a model of 24 layers with one question."""
    answer = {"score": 1.0, "correct": True, "output": "a few words " * 4, "asked_triggered": 0.5, "hit": 0.5}
    layers: dict[str, Any] = dict.fromkeys(
        ("layer", "effective_budget", "kept_fraction", "trigger_rate", "last_triggered", "asked_triggered", "hit"),
        [0.123456] * LAYERS,
    )
    example, answers = f"{context}/{number}", [answer | {"hit_union": 1.0}]
    return Run("m", example, policy, 1.0, 1, 1, 20.5, 0.3, context, 1.0, answers, layers, [])


def fill(store: Store, rows: int) -> None:
    """In one transaction: a single writer that commits each row would need a day of examples anyway."""
    variants = [(Spec.parse(name), 8 if name != "dense" else 0) for name in DEFAULT]
    policies = {spec: spec.policy(budget).to_json() for spec, budget in variants}
    store.add_model("m", "synthetic", {})
    with store.transaction():
        for i in range(rows):
            (spec, budget), rest = variants[i % len(variants)], i // len(variants)
            context, rest = CONTEXTS[rest % len(CONTEXTS)], rest // len(CONTEXTS)
            task, number = TASKS[rest % len(TASKS)], rest // len(TASKS)
            run = _run(number, policies[spec], context)
            run = Run(**(vars(run) | {"example": f"{task}/{run.example}"}))
            store.put(Cell("m", task, context, 0, number, str(spec), budget), run)


def add_all(store: Store, listed: list[tuple[Cell, Run]]) -> None:
    for cell, run in listed:
        store.add(cell, run)


def timed(what: str, call: Callable[[], object]) -> None:
    """Prints the seconds by the clock, and those of the processor, which other work on the machine does not touch."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    print(f"{what:<52} {clock:9.4f} s {processor:9.4f} s CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as directory, Store(Path(directory) / "results.db") as store:
        timed(f"filling it with {rows} rows, in one transaction", lambda: fill(store, rows))
        print(f"{'its size':<52} {store.path.stat().st_size / 2**20:9.1f} MiB")
        more = [(Cell("m", "more", 8192, 0, i, "dense", 0), _run(i, "{}", 8192)) for i in range(100)]
        timed("100 more rows, each safe on disk before the next", lambda: add_all(store, more))
        timed("what is known of one example", lambda: store.known("m", "one", 8192, 0, 7))
        timed("one policy's rows of one task and context", lambda: list(
            store.rows(model="m", task="one", context=8192, policy="quest", budget=8)
        ))  # fmt: skip
        timed("all findings of one task and context", lambda: [
            g.lines() and g.comparisons() for g in summary.groups(store, model="m", task="one", context=8192)
        ])  # fmt: skip
        timed("everything as CSV", lambda: export(store, Path(directory) / "all.csv"))


if __name__ == "__main__":
    main()
