"""Runs one of the paper's experiments for a model, and puts our figures beside the paper's.

Experiments are written in the paper's contexts and budgets. A small model gets both divided by the same scale, so that
the tile budget stays about the same part of all blocks; titles say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from closecall.models import catalogue as known_models
from closecall.models.cache import UnavailableError
from closecall.models.load import own_name
from closecall.registry import unknown
from closecall.rules.topk import TopK
from closecall_lab import tasks
from closecall_lab.eval import executors, runner
from closecall_lab.eval.grid import Grid
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store
from closecall_lab.report import paper
from closecall_lab.report.gather import Finding, Gathered, Setting, gather, public
from closecall_lab.spine.numbers import size
from closecall_lab.spine.progress import Say, say
from closecall_lab.tasks.longbench import FromData

from .experiments import FOR_PROBES, Experiment, Part

SCALES = {"probe": 4, "smollm2": 8}  # what the models that run on a laptop get without being asked
LEAST = 3  # of a scaled budget: below it a tile is left with no choice beside the blocks it is forced to keep


@dataclass(frozen=True)
class ScaledExperiment:
    """An experiment as it will run: the paper's sizes divided by `scale`, tasks that fit the model, data filled in."""

    experiment: Experiment
    model: str
    scale: Fraction
    n: int
    seed: int = 0
    data: tuple[str, ...] = ()
    left_out: tuple[str, ...] = field(default=(), compare=False)
    parts: tuple[Part, ...] = ()

    @property
    def is_probe(self) -> bool:
        return self.model.split(":")[0] == "probe"

    def context(self, papers: int) -> int:
        return round(papers / self.scale)

    def budget(self, papers: int) -> int:
        return max(LEAST, round(papers / self.scale)) if self.scale != 1 else papers

    def task(self, papers: str) -> str:
        return str(tasks.get(FOR_PROBES[papers] if self.is_probe else papers, **self._source(papers)))

    def _source(self, papers: str) -> dict[str, str]:
        if not self.experiment.data:
            return {}
        path = _data(papers, self.data)
        return {"data": path} if path else {}

    def grids(self, dtype: str | None = None) -> list[Grid]:
        return [
            Grid(
                models=(self.model,),
                tasks=tuple(dict.fromkeys(self.task(t) for t in part.tasks)),
                contexts=tuple(dict.fromkeys(map(self.context, part.contexts))),
                specs=tuple(map(Spec.parse, part.policies)),
                budgets=tuple(dict.fromkeys(map(self.budget, part.budgets))),
                n=self.n,
                seed=self.seed,
                dtype=dtype,
            )
            for part in self.parts
        ]

    @property
    def sizes(self) -> str:
        """What was scaled to what: contexts, and budgets with their tile budgets."""
        contexts = sorted({c for p in self.parts for c in p.contexts})
        budgets = sorted({b for p in self.parts for b in p.budgets})
        said = [f"{size(c)} -> {size(self.context(c))}" for c in contexts]
        kept = [f"{b} ({_tile(b)} a tile) -> {self.budget(b)} ({_tile(self.budget(b))} a tile)" for b in budgets]
        return f"contexts {', '.join(said)}; budgets {', '.join(kept)}"

    @property
    def title(self) -> str:
        e = self.experiment
        if self.scale == 1:
            return f"Reproducing {e.where}: {e.name} on {own_name(self.model)}, at the paper's contexts and budgets"
        contexts = [self.context(c) for p in self.parts for c in p.contexts]
        budgets = [self.budget(b) for p in self.parts for b in p.budgets]
        kept = f"budget {_range(budgets, str)} ({_range(map(_tile, budgets), str)} a tile)"
        scaled = f"SCALED to 1/{float(self.scale):g} of its contexts and budgets: {_range(contexts, size)}, {kept}"
        return f"Reproducing {e.where}: {e.name} on {own_name(self.model)}, {scaled}"

    @property
    def lead(self) -> list[str]:
        """How this run differs from the paper's."""
        lines = [f"Scaled: {self.sizes}; no budget below {LEAST}."] if self.scale != 1 else []
        swapped = sorted({f"{t} -> {self.task(t)}" for p in self.parts for t in p.tasks} if self.is_probe else ())
        lines += [f"The probes' own tasks take the place of the paper's: {', '.join(swapped)}."] if swapped else []
        if self.n != self.experiment.n and self.experiment.name != "pch":  # of that one the paper tells no n
            lines.append(f"Up to {self.n} examples of each task and context; the paper had {self.experiment.n}.")
        entry = known_models.find(self.model)
        if entry is not None and entry.name in paper.MODELS:
            lines.append(f"{entry.name} is the paper's {paper.MODELS[entry.name]}.")
        return lines


def _range(values: Iterable[int], write: Callable[[int], str]) -> str:
    found = sorted(set(values))
    return write(found[0]) if len(found) == 1 else f"{write(found[0])}-{write(found[-1])}"


def _tile(budget: int) -> int:
    return TopK(budget).tile_budget


def default_scale(model: str) -> Fraction:
    return Fraction(SCALES.get(model.lower().split(":")[0], 1))


def make_plan(
    experiment: Experiment,
    model: str,
    *,
    n: int | None = None,
    scale: Fraction | None = None,
    seed: int = 0,
    data: Sequence[str] = (),
) -> ScaledExperiment:
    """Checks that the model can do it, that the data is there, and leaves out, saying so, what cannot be run."""
    factor = default_scale(model) if scale is None else scale
    if factor < 1:
        raise ValueError(f"scale divides the paper's contexts and budgets: give at least 1, got {float(factor):g}")
    if data and not experiment.data:
        raise ValueError(f"{experiment.name} makes its examples up and takes no --data")
    named = [item.partition("=")[0] for item in data if "=" in item]
    for name in named:
        if name not in _sources(experiment):
            raise unknown(f"data of {experiment.name}", name, _sources(experiment))
    plan = ScaledExperiment(experiment, model, factor, experiment.n if n is None else n, seed, tuple(data))
    if plan.is_probe and any(t not in FOR_PROBES for part in experiment.parts for t in part.tasks):
        raise ValueError(
            f"{experiment.name} is real text, and the probes know a thousand words: take another model, like smollm2"
        )
    parts, left_out = _possible(plan)
    if experiment.data:
        parts, missing = _readable(plan, parts)
        left_out += missing
    if not parts:
        raise ValueError(f"nothing of {experiment.name} can be run with {model}: {'; '.join(left_out)}")
    return dataclasses.replace(plan, parts=tuple(parts), left_out=tuple(left_out))


def _possible(plan: ScaledExperiment) -> tuple[list[Part], list[str]]:
    """Without contexts that the small model we scaled for was never trained to read."""
    entry = known_models.find(plan.model) if plan.scale != 1 else None
    trained = entry.trained_context if entry else None
    parts, left_out = [], []
    for part in plan.experiment.parts:
        fits = tuple(c for c in part.contexts if trained is None or plan.context(c) <= trained)
        left_out += [
            f"the paper's {size(c)}, here {size(plan.context(c))}, is left out: {plan.model} was trained for {trained}"
            for c in part.contexts
            if c not in fits
        ]
        if fits:
            parts.append(dataclasses.replace(part, contexts=fits))
    return parts, left_out


def _sources(experiment: Experiment) -> list[str]:
    return ["longbench-v2"] if experiment.name == "longbench-v2" else ["musique", "narrativeqa", "qasper"]


def _data(task: str, data: Sequence[str]) -> str | None:
    """The file given for this task: `NAME=FILE` by name, a bare FILE for all."""
    plain = task.partition(":")[0]
    for item in reversed(data):
        name, equals, path = item.partition("=")
        if equals and plain.endswith(name):
            return path
    return next((item for item in reversed(data) if "=" not in item), None)


def _readable(plan: ScaledExperiment, parts: list[Part]) -> tuple[list[Part], list[str]]:
    """Reads the data now: what is missing must be known before a model is loaded."""
    for item in plan.data:
        if "," in item:
            raise ValueError(f"--data {item!r}: a comma ends an option of a task, so rename the file")
        if "=" not in item and plan.experiment.name == "longbench-v1" and not item.endswith(".zip"):
            names = ", ".join(f"{name}=FILE" for name in _sources(plan.experiment))
            raise ValueError(
                f"--data {item!r}: say whose it is ({names}), or give LongBench's data.zip, which has them all"
            )
    problems: dict[str, Exception] = {}
    for task in dict.fromkeys(t for part in parts for t in part.tasks):
        error = _problem(task, plan._source(task))
        if error is not None:
            problems[task] = error
    kept = [dataclasses.replace(p, tasks=tuple(t for t in p.tasks if t not in problems)) for p in parts]
    kept = [p for p in kept if p.tasks]
    if not kept:
        raise _how(plan, next(iter(problems.values())))
    files = [item.partition("=")[2] or item for item in plan.data]
    return kept, [f"{task} is left out: {_by_name(str(error), files)}" for task, error in problems.items()]


def _by_name(text: str, files: Sequence[str]) -> str:
    """Files by their names alone: a report does not tell whose disk they were on."""
    for file in files:
        text = text.replace(file, Path(file).name)
    return text


def _problem(task: str, source: dict[str, str]) -> Exception | None:
    """Why the task's data cannot be read."""
    found = tasks.get(task, **source)
    assert isinstance(found, FromData)  # experiments with data have no others
    try:
        found.rows()
    except (ValueError, OSError) as error:
        return error
    return None


def _how(plan: ScaledExperiment, error: Exception) -> Exception:
    if plan.experiment.name == "longbench-v2":
        files = "--data FILE with LongBench-v2's rows (JSON, JSON Lines or Parquet; on the hub: THUDM/LongBench-v2)"
    else:
        files = (
            "--data data.zip, as in THUDM/LongBench on the hub, or --data narrativeqa=FILE --data qasper=FILE; and "
            "--data musique=FILE, a file of MuSiQue itself, whose ids tell the hops"
        )
    kind = UnavailableError if isinstance(error, OSError) else ValueError
    return kind(f"{plan.experiment.name} needs data: {error}. Give {files}")


@dataclass(frozen=True)
class Outcome:
    """What came out, found by the paper's own sizes."""

    plan: ScaledExperiment
    gathered: Gathered

    def setting(self, task: str, context: int) -> Setting | None:
        wanted = (public(self.plan.task(task)), self.plan.context(context))
        return next((s for s in self.gathered.settings if (s.task, s.context) == wanted), None)

    def find(self, task: str, context: int, policy: str, budget: int = 33) -> Finding | None:
        setting = self.setting(task, context)
        spec = str(Spec.parse(policy))
        return setting.find(spec, 0 if spec == "dense" else self.plan.budget(budget)) if setting else None


def run(
    plan: ScaledExperiment,
    store: Store,
    *,
    dtype: str | None = None,
    executor: str = "local",
    jobs: int = 1,
    address: str | None = None,
    say: Say = say,
) -> Outcome:
    """Runs what the store does not have yet, then gathers this experiment's results and no others."""
    grids = plan.grids(dtype)
    for note in dict.fromkeys(note for grid in grids for note in grid.notes):
        say(f"warning: {note}")
    workers = executors.start(executor, plan.model, dtype, jobs=jobs, address=address)
    try:
        fingerprints = {runner.run_model(grid, store, workers, jobs=jobs, say=say) for grid in grids}
    finally:
        workers.close()
    cells = {
        (task, context, str(spec), budget)
        for grid in grids
        for task in grid.tasks
        for context in grid.contexts
        for spec, budget in grid.variants
    }
    found = gather(store, models=fingerprints, n=plan.n, seed=plan.seed, wanted=lambda *cell: cell in cells)
    return Outcome(plan, found)
