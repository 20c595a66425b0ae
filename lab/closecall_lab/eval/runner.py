"""Runs a grid: what the store has is left alone, what is missing is measured and stored one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from closecall.models.load import own_name

from ..spine.interrupt import interruptible, terminable
from ..spine.progress import Say, say
from . import executors
from .grid import Grid, Job
from .progress import Progress
from .store import Cell, Store


def run(
    grid: Grid, store: Store, *, executor: str = "local", jobs: int = 1, address: str | None = None, say: Say = say
) -> list[str]:
    """Fills the store with the grid's cells, and returns the fingerprints of its models."""
    for note in grid.notes:
        say(f"warning: {note}")
    for task in dict.fromkeys(task for task, context in grid.places if not context):
        say(f"{task}: its documents have their own lengths, so --contexts does not apply to it")
    fingerprints = []
    for name in grid.models:
        with _told(_interrupted(store), say):
            workers = executors.start(executor, name, grid.dtype, jobs=jobs, address=address)
        try:
            fingerprints.append(run_model(grid, store, workers, jobs=jobs, say=say))
        finally:
            workers.close()
    return fingerprints


def run_model(grid: Grid, store: Store, workers: executors.Executor, *, jobs: int = 1, say: Say = say) -> str:
    model = workers.identity()
    store.add_model(model.fingerprint, model.name, model.facts)
    name, trained = own_name(model.name), model.facts.get("context")
    for context in dict.fromkeys(context for _, context in grid.places):
        if trained is not None and context > trained:
            say(f"warning: {name} was trained for {trained} tokens: at {context} it may fail whatever the policy")
    progress = Progress(grid, name, jobs=jobs)

    def with_known() -> Iterator[Job]:
        for job in grid.jobs():
            known = store.known(model.fingerprint, job.task, job.context, job.seed, job.number)
            yield dataclasses.replace(job, known=known)

    message = _interrupted(store)
    # A kernel that runs for minutes hides signals from Python; a cluster of workers must be taken down in order.
    local = isinstance(workers, executors.Local)
    with interruptible(f"\nclosecall: {message}") if local else _told(message, say):
        for result in workers.run(with_known()):
            job = result.job
            cell = Cell(model.fingerprint, job.task, job.context, job.seed, job.number, str(result.spec), result.budget)
            if result.run is not None:
                store.add(cell, result.run)
            else:
                store.link(cell, result.key)
            progress.add(result)
    progress.finish()
    return model.fingerprint


def _interrupted(store: Store) -> str:
    return f"interrupted; finished runs are in {store.path}: the same command goes on from there"


@contextmanager
def _told(message: str, say: Say) -> Iterator[None]:
    try:
        with terminable():
            yield
    except KeyboardInterrupt:
        say(message)
        raise
