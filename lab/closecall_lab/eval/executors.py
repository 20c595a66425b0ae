"""Runs jobs in this process, in several of this machine, or on a Ray cluster. Results come back to one writer.

A worker holds one model and makes each example itself from the task's name, the seed and the number, so only small
things travel. What it is told of known runs it does not run again.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from closecall.registry import unknown

from .grid import Job
from .kinds import Opened, parse
from .matched import Applied, applied_control
from .spec import Spec
from .store import Kept, Run, address

NAMES = ("local", "ray")
RETRIES = 5  # of a Ray worker that died, and of the job it was at


class Identity(NamedTuple):
    """The model a worker holds."""

    fingerprint: str
    name: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A job's outcome under one policy. `run` is None where the run was known; the key says which."""

    job: Job
    spec: Spec
    budget: int
    key: str
    run: Run | None


class Worker:
    """One model, and the examples asked for."""

    def __init__(self, model: str, dtype: str | None = None) -> None:
        from .subject import Subject

        self.subject = Subject.open(model, dtype=dtype)
        self._open: dict[tuple[str, int, int], tuple[Iterator[Any], int, Any]] = {}
        self._tasks: dict[str, Opened] = {}

    def identity(self) -> Identity:
        return Identity(self.subject.fingerprint, self.subject.loaded.name, self.subject.facts)

    def _task(self, name: str) -> Opened:
        if name not in self._tasks:
            self._tasks[name] = parse(name).on(self.subject)
        return self._tasks[name]

    def example(self, job: Job) -> Any:
        """The job's example; None past the end of a task that has fewer. Only the last one made is held."""
        key = (job.task, job.context, job.seed)
        stream, at, last = self._open.get(key, (None, job.number + 1, None))
        if stream is None or at > job.number:
            stream, at = self._task(job.task).examples(job.context, job.seed), -1
        while at < job.number:
            last, at = next(stream, None), at + 1
        self._open[key] = (stream, at, last)
        return last

    def work(self, job: Job) -> Iterator[Result]:
        example = self.example(job)
        if example is None:
            return
        done = dict(job.known)
        digest = example.digest()
        resolved: dict[tuple[Spec, int], str] = {}
        for spec, budget in job.variants:
            chosen = _policy(spec, budget, job.number, resolved, done)
            key = address(self.subject.fingerprint, digest, chosen.to_json())
            resolved[spec, budget] = key
            if key in done:
                yield Result(job, spec, budget, key, None)
                continue
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".* never cut anything")  # once: it is in the run's notes
                run = self._task(job.task).measure(example, chosen)
            done[key] = Kept.of(run)
            yield Result(job, spec, budget, key, run)


def _policy(
    spec: Spec, budget: int, number: int, resolved: dict[tuple[Spec, int], str], done: dict[str, Kept]
) -> Applied:
    policy = spec.policy(budget, number)
    return applied_control(policy, *done[resolved[spec.base, budget]]) if spec.control == "matched" else Applied(policy)


class Executor(Protocol):
    """Workers for one model."""

    def identity(self) -> Identity: ...

    def run(self, jobs: Iterator[Job]) -> Iterator[Result]:
        """Takes jobs as workers become free, and gives results as they come."""

    def close(self) -> None: ...


class Local:
    """This process: results one by one, as they are measured."""

    def __init__(self, model: str, dtype: str | None = None) -> None:
        self.worker = Worker(model, dtype)

    def identity(self) -> Identity:
        return self.worker.identity()

    def run(self, jobs: Iterator[Job]) -> Iterator[Result]:
        for job in jobs:
            yield from self.worker.work(job)

    def close(self) -> None:
        pass


class WorkerError(OSError):
    """A worker could not do its job."""


def _end_with_parent() -> None:
    """Ends this process as soon as its parent is gone, however that ended. A thread waits, so a kernel may run on."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(pipe: Connection, model: str, dtype: str | None, threads: int) -> None:
    """A worker process: a job comes in, results go out, then None."""
    _end_with_parent()
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business, which then closes the pipe
    torch.set_num_threads(threads)
    try:
        worker = Worker(model, dtype)
        pipe.send(worker.identity())
        while (job := pipe.recv()) is not None:
            for result in worker.work(job):
                pipe.send(result)
            pipe.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the driver closed the pipe, perhaps without reading it
        return
    except BaseException as error:
        pipe.send(error if isinstance(error, (ValueError, OSError)) else WorkerError(traceback.format_exc()))


class Processes:
    """Several processes of this machine, each with the model, torch's threads shared out among them."""

    def __init__(self, model: str, dtype: str | None = None, *, jobs: int) -> None:
        import torch

        threads = max(1, torch.get_num_threads() // jobs)
        context = multiprocessing.get_context("spawn")  # forking a process that has run torch can hang
        self.processes: dict[Connection, Any] = {}
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, model, dtype, threads), daemon=True)
            process.start()
            theirs.close()  # so that a dead worker is an end of file here
            self.processes[ours] = process
        try:
            self._identities = [self._receive(pipe) for pipe in self.processes]
        except BaseException:
            self.close()
            raise

    def identity(self) -> Identity:
        found: Identity = self._identities[0]
        return found

    def _receive(self, pipe: Connection) -> Any:
        try:
            got = pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self.processes[pipe]
            process.join()
            raise WorkerError(
                f"a worker process ended with code {process.exitcode}; what is stored is safe, and the same command "
                "goes on from there (was it out of memory? use fewer --jobs)"
            ) from None
        if isinstance(got, BaseException):
            raise got
        return got

    def run(self, jobs: Iterator[Job]) -> Iterator[Result]:
        busy: set[Connection] = set()
        for pipe in self.processes:
            self._next(pipe, jobs, busy)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                result = self._receive(ready)
                if result is None:
                    self._next(ready, jobs, busy)
                else:
                    yield result

    @staticmethod
    def _next(pipe: Connection, jobs: Iterator[Job], busy: set[Connection]) -> None:
        job = next(jobs, None)
        if job is None:
            busy.discard(pipe)
        else:
            pipe.send(job)
            busy.add(pipe)

    def close(self) -> None:
        for pipe, process in self.processes.items():
            pipe.close()
            process.terminate()
            process.join()


class Ray:
    """A Ray cluster: the one at `address`, or one of this machine's. One model for each worker.

    A worker that dies is started again and repeats the job it was at. Its results come once, when the job is done.
    """

    def __init__(self, model: str, dtype: str | None = None, *, jobs: int, address: str | None = None) -> None:
        self.ray = import_ray(address)
        self._ours = not self.ray.is_initialized()
        if self._ours:
            connect(address, jobs)
        remote = self.ray.remote(num_cpus=1, max_restarts=RETRIES, max_task_retries=RETRIES)(RayWorker)
        try:
            self.workers = [remote.remote(model, dtype) for _ in range(jobs)]
            self._identity: Identity = self._get(self.workers[0].identity.remote())
        except BaseException:
            self.close()
            raise

    def _get(self, reference: Any) -> Any:
        """A result; an error of ours as it was raised in the worker."""
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, (ValueError, OSError)):
                raise error.cause from None
            raise WorkerError(str(error)) from error
        except exceptions.RayActorError as error:
            raise WorkerError(
                f"a Ray worker died more than {RETRIES} times ({str(error).splitlines()[0]}); what is stored is safe, "
                "and the same command goes on from there"
            ) from error

    def identity(self) -> Identity:
        return self._identity

    def pids(self) -> list[int]:
        return [int(self._get(worker.pid.remote())) for worker in self.workers]

    def run(self, jobs: Iterator[Job]) -> Iterator[Result]:
        busy: dict[Any, Any] = {}  # what a worker will return, and the worker

        def give(worker: Any) -> None:
            job = next(jobs, None)
            if job is not None:
                busy[worker.all.remote(job)] = worker

        for worker in self.workers:
            give(worker)
        while busy:
            ready, _ = self.ray.wait(list(busy), num_returns=1)
            worker = busy.pop(ready[0])
            results = self._get(ready[0])
            give(worker)
            yield from results

    def close(self) -> None:
        for worker in getattr(self, "workers", []):
            self.ray.kill(worker)
        if self._ours:
            self.ray.shutdown()


class RayWorker:
    """A worker that loads its model with the first call, since Ray hides why a worker could not be made.

    Ray repeats calls that return, so a job's results travel together.
    """

    def __init__(self, model: str, dtype: str | None) -> None:
        self._given = (model, dtype)
        self._worker: Worker | None = None

    def _loaded(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(*self._given)
        return self._worker

    def identity(self) -> Identity:
        return self._loaded().identity()

    def pid(self) -> int:
        return os.getpid()

    def all(self, job: Job) -> list[Result]:
        return list(self._loaded().work(job))


def import_ray(address: str | None) -> Any:
    """Ray, told by its environment variables what it reads while it is imported."""
    if importlib.util.find_spec("ray") is None:
        raise WorkerError("--executor ray needs Ray, which is not installed: pip install './lab[ray]'")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
    if address is None:  # a cluster of this machine alone: then it listens on the loopback interface only
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    return importlib.import_module("ray")


def connect(address: str | None, jobs: int) -> Any:
    """Ray, connected to the cluster at `address`, or to a new one with room for so many workers."""
    ray = import_ray(address)
    where = {"num_cpus": jobs, "include_dashboard": False} if address is None else {"address": address}
    try:
        ray.init(log_to_driver=False, logging_level="error", **where)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
    return ray


def start(name: str, model: str, dtype: str | None = None, *, jobs: int = 1, address: str | None = None) -> Executor:
    """The executor of that name, with its workers up and the model loaded."""
    if name not in NAMES:
        raise unknown("executor", name, NAMES)
    if jobs < 1:
        raise ValueError(f"jobs must be a number of workers, at least 1, got {jobs}")
    if name == "ray":
        return Ray(model, dtype, jobs=jobs, address=address)
    if address is not None:
        raise ValueError("--address is a Ray cluster's: it needs --executor ray")
    make: Callable[[], Executor] = (
        (lambda: Local(model, dtype)) if jobs == 1 else (lambda: Processes(model, dtype, jobs=jobs))
    )
    return make()
