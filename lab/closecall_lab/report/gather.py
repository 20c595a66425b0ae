"""Turns a store's rows into what a report shows: settings (a model, a task, a context), one finding per policy.

A setting's policies are compared on the same examples only. Where some were not run everywhere, that is in the notes.
"""

from __future__ import annotations

import re
import statistics as plain_statistics
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from closecall.models.load import own_name
from closecall.policy import Policy
from closecall.registry import unknown

from ..eval import statistics, summary, text_tables
from ..eval.matched import TOLERANCE
from ..eval.spec import Spec
from ..eval.statistics import Comparison, Estimate
from ..eval.store import Row, Store
from ..eval.summary import Group, Line, Split, Variant
from ..spine.numbers import known_mean, size
from ..spine.table import Table
from .rivals import DENSE, pairs, text_pairs

BY_LAYER = ("hit", "hit_union", "trigger_rate", "asked_triggered", "last_triggered")
ENOUGH = 0.5  # of the examples that count: a policy that ran fewer is left out, so that it does not shrink the others


@dataclass(frozen=True)
class Finding:
    """One policy at one budget. Means by layer are None where nothing could be measured."""

    spec: Spec
    line: Line
    accuracy: Estimate
    paired: Estimate | None
    layers: list[int]
    by_layer: dict[str, list[float | None]]
    by_hop: list[float]  # share of gold blocks of each hop that some head of a layer kept, over layers
    prefill_seconds: float
    prefill_vs_dense: float | None
    by_logits: Estimate | None

    @property
    def variant(self) -> Variant:
        return self.line.policy, self.line.budget

    @property
    def scorer(self) -> str | None:
        return self.spec.scorer

    @property
    def triggers(self) -> bool:
        return self.spec.triggers

    @property
    def budget_text(self) -> str:
        return budget_text(self.spec, self.line.budget)

    @property
    def blocks(self) -> float:
        return blocks(self.line)

    @property
    def label(self) -> str:
        return f"{self.spec.title}, {self.budget_text}" if self.line.budget else self.spec.title


def budget_text(spec: Spec, budget: int) -> str:
    """The budget and, always with it, the tile budget."""
    if not budget:
        return "every block" if spec.preset == "dense" else "its own"
    tile = spec.tile_budget(budget)
    as_much = "as much as " if spec.control == "matched" else ""  # not this many, but what the router then kept
    return f"{as_much}{budget}" + (f" ({tile} a tile)" if tile is not None else "")


def blocks(line: Line) -> float:
    """What a tile kept, in blocks of 64 keys: policies with smaller blocks keep more of them to read as much."""
    keys: int = dict(Spec.parse(line.policy).overrides).get("block", Policy.block)
    return line.effective_budget * keys / Policy.block


@dataclass(frozen=True)
class Setting:
    """All policies on the same examples of one model, task and context."""

    model: str
    fingerprint: str
    task: str
    context: int
    shared: bool  # whether questions share contexts
    findings: list[Finding]
    tests: list[tuple[Variant, Variant, Comparison]]
    splits: list[Split]
    notes: list[str]
    gaps: dict[tuple[Variant, Variant], dict[str, float]]  # of each test, by example: how much more the first scored

    @property
    def examples(self) -> int:
        return self.findings[0].line.examples if self.findings else 0

    @property
    def questions(self) -> int:
        return self.findings[0].accuracy.n if self.findings else 0

    @property
    def graded(self) -> bool:
        """Whether the task gives shares of a point, so that the mean score says more than the accuracy."""
        return any(f.line.score.value != f.accuracy.value for f in self.findings)

    @property
    def kept(self) -> dict[Variant, float]:
        """What a tile kept under each policy, in blocks of 64 keys."""
        return {f.variant: f.blocks for f in self.findings}

    def find(self, policy: str, budget: int) -> Finding | None:
        return next((f for f in self.findings if f.variant == (policy, budget)), None)

    def test(self, a: Variant, b: Variant) -> Comparison | None:
        return next((c for x, y, c in self.tests if (x, y) == (a, b)), None)


@dataclass(frozen=True)
class Texts:
    """All policies on the same texts of one kind and length. They have no questions: what counts is KL to dense."""

    model: str
    task: str
    context: int
    lines: dict[Variant, Line]
    kl: dict[Variant, dict[str, float]]  # by text
    tables: list[Table]
    notes: list[str]


@dataclass(frozen=True)
class Gathered:
    """Everything a report is made from."""

    source: str
    settings: list[Setting]
    texts: list[Texts]
    labels: dict[str, str]  # what the weights are, by the model's name as shown
    notes: list[str]

    @property
    def places(self) -> list[Setting | Texts]:
        return [*self.settings, *self.texts]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(place.model for place in self.places))

    def of(self, model: str) -> list[Setting]:
        return [s for s in self.settings if s.model == model]

    def texts_of(self, model: str) -> list[Texts]:
        return [t for t in self.texts if t.model == model]


Examples = set[tuple[Any, ...]]  # seed and number of each
Wanted = Callable[[str, int, str, int], bool]  # task, context, policy, budget


def gather(
    store: Store,
    *,
    models: Collection[str] | None = None,
    wanted: Wanted | None = None,
    first: Collection[Variant] = (),
    n: int | None = None,
    seed: int | None = None,
) -> Gathered:
    """What the store has of these models, by name or fingerprint (all of them), task by task and context by context.

    All policies of a setting are compared on the examples that every one of them ran. The variants in `first`, or all
    if none of them was run, say which examples those should be; others that ran few of them are left out.
    """
    known = {fingerprint: str(facts["name"]) for fingerprint, facts in store.models().items()}
    chosen = _chosen(known, models)
    shown = _names(known)
    settings: list[Setting] = []
    texts: list[Texts] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a policy warns of when it is read is in the notes
        for (fingerprint, task, context), variants in _contents(store, seed, n).items():
            here = {v: ran for v, ran in variants.items() if wanted is None or wanted(task, context, *v)}
            if fingerprint not in chosen or not here:
                continue
            group, notes = _group(store, fingerprint, task, context, here, first, n, seed)
            notes = [note.replace(known[fingerprint], own_name(known[fingerprint])) for note in notes]
            if text_tables.is_text(group):
                texts.append(_texts(group, shown[fingerprint], notes))
            else:
                settings.append(_setting(group, shown[fingerprint], notes))
    labels = {shown[f]: str(facts.get("label") or "") for f, facts in store.models().items() if f in chosen}
    found = Gathered(store.path.name, settings, texts, labels, [])
    nothing = f"{store.path} has no results of what was asked: `closecall eval` puts them there."
    return found if found.places else replace(found, notes=[nothing])


def _chosen(known: dict[str, str], asked: Collection[str] | None) -> set[str]:
    if asked is None:
        return set(known)
    fingerprints = set()
    for name in asked:
        here = {f for f, n in known.items() if name in (n, own_name(n)) or (len(name) >= 8 and f.startswith(name))}
        if not here:
            raise (
                unknown("model in the store", name, set(known.values()))
                if known
                else ValueError(f"the store has no model {name!r}: it is empty")
            )
        fingerprints |= here
    return fingerprints


def _names(known: dict[str, str]) -> dict[str, str]:
    """Names to show. Different weights of the same name are told apart by their fingerprints."""
    plain = {fingerprint: own_name(name) for fingerprint, name in known.items()}
    shown = list(plain.values())
    return {f: name if shown.count(name) == 1 else f"{name} {f[:8]}" for f, name in plain.items()}


def _contents(store: Store, seed: int | None, n: int | None) -> dict[tuple[str, str, int], dict[Variant, Examples]]:
    """Which examples each policy ran in each setting, without reading the runs themselves."""
    contents: dict[tuple[str, str, int], dict[Variant, Examples]] = {}
    for cell in store.cells(seed=seed, below=n):
        setting = contents.setdefault((cell.model, cell.task, cell.context), {})
        setting.setdefault((cell.policy, cell.budget), set()).add((cell.seed, cell.number))
    return contents


def _usable(variants: dict[Variant, Examples], wanted: Examples) -> int:
    """How many runs would be compared on these examples."""
    shared = (len(ran & wanted) for ran in variants.values())
    return sum(n for n in shared if n >= ENOUGH * len(wanted))


def _group(
    store: Store,
    fingerprint: str,
    task: str,
    context: int,
    variants: dict[Variant, Examples],
    first: Collection[Variant],
    n: int | None,
    seed: int | None,
) -> tuple[Group, list[str]]:
    """The runs to compare, and notes on what was left out."""
    leading = {v: ran for v, ran in variants.items() if v in first} or variants
    # The examples that make use of the most runs; of equals dense's, which everything is compared with.
    most = max(leading, key=lambda v: (_usable(leading, leading[v]), v == DENSE))
    wanted = variants[most]
    least = {v: ENOUGH if v in leading else 1.0 for v in variants}
    few = {v: len(ran & wanted) for v, ran in variants.items() if len(ran & wanted) < least[v] * len(wanted)}
    where: dict[str, Any] = {"model": fingerprint, "task": task, "context": context, "seed": seed}
    (group,) = summary.groups(store, variants=set(variants) - set(few), n=n, **where)
    notes = [
        f"{summary.label(v)} is left out: it ran {c} of {summary.label(most)}'s {len(wanted)} examples; go on with the "
        "same `closecall eval`."
        for v, c in few.items()
    ]
    if group.left_out:
        notes.append(
            f"Examples left out, because not every policy has run them, or not as they now are: {group.left_out}; "
            "go on with the same `closecall eval`."
        )
    if not group.rows:
        notes.append("No example was run by all policies, so there is nothing to compare.")
    return group, notes + [f"Warning: {w}" for w in _alike(group.warnings)]


def _setting(group: Group, model: str, notes: list[str]) -> Setting:
    task = public(group.task)
    if not group.rows:
        return Setting(model, group.model, task, group.context, False, [], [], [], notes, {})
    findings = [_finding(group, line) for line in group.lines()]
    splits = group.splits()
    kept = {f.variant: f.blocks for f in findings}
    found = pairs({variant: kept[variant] for variant in group.rows})
    tests = [(*p, c) for p, c in zip(found, group.comparisons(found), strict=True)] if found else []
    gaps = {(a, b): _gaps(group, a, b) for a, b in found}
    notes = [*notes, *_remarks(group, findings, splits)]
    # The rows themselves are not kept: they hold every layer of every run, and a store may have a hundred thousand.
    return Setting(model, group.model, task, group.context, group.shared, findings, tests, splits, notes, gaps)


def _texts(group: Group, model: str, notes: list[str]) -> Texts:
    lines = {(line.policy, line.budget): line for line in group.lines()}
    kl = {v: text_tables.by_text(group, v, "kl") for v in lines}
    tables = text_tables.compared(
        group, f"KL to dense: {text_tables.sample(group)}", text_pairs({v: blocks(line) for v, line in lines.items()})
    )
    return Texts(model, public(group.task), group.context, lines, kl, tables, notes)


def public(task: str) -> str:
    """The task's name without where its data lies."""
    name, _, options = task.partition(":")
    kept = [option for option in options.split(",") if option and not option.startswith(("data=", "include="))]
    return f"{name}:{','.join(kept)}" if kept else name


def place(setting: Setting | Texts) -> str:
    """Task and context, in short; lm-eval's documents have their own lengths, and no context."""
    return f"{setting.task}, {size(setting.context)}" if setting.context else setting.task


def _finding(group: Group, line: Line) -> Finding:
    variant = (line.policy, line.budget)
    rows = group.rows[variant]
    letters = group.letters(variant)
    return Finding(
        spec=Spec.parse(line.policy),
        line=line,
        accuracy=statistics.share(group.correct(variant), group.clusters),
        paired=line.paired,
        layers=list(rows[0].run.layers["layer"]),
        by_layer={name: _by_layer([row.run.layers[name] for row in rows]) for name in BY_LAYER},
        by_hop=_by_hop(rows),
        prefill_seconds=plain_statistics.median(_prefills(rows)),
        prefill_vs_dense=_vs_dense(group, variant),
        by_logits=statistics.share(letters, group.clusters) if letters else None,
    )


def _by_layer(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [known_mean(column) for column in zip(*lists, strict=True)]


def _by_hop(rows: Sequence[Row]) -> list[float]:
    lists = [row.run.layers["hop_union"] for row in rows if "hop_union" in row.run.layers]
    if not lists or len({len(hops) for hops in lists}) > 1:
        return []
    return [plain_statistics.fmean(x for hops in lists for x in hops[k]) for k in range(len(lists[0]))]


def _prefills(rows: Sequence[Row]) -> list[float]:
    return [row.run.layers.get("prefill_seconds", row.run.wall) for row in rows]


def _vs_dense(group: Group, variant: Variant) -> float | None:
    """The median over examples of the prefill's time over dense's, which ran beside it."""
    if DENSE not in group.rows:
        return None
    pairs = zip(_prefills(group.rows[variant]), _prefills(group.rows[DENSE]), strict=True)
    ratios = [mine / theirs for mine, theirs in pairs if theirs > 0]
    return plain_statistics.median(ratios) if ratios else None


def _alike(texts: Sequence[str]) -> list[str]:
    """Lists texts that differ only in their numbers once, with a count."""
    kinds: dict[str, list[str]] = {}
    for text in texts:
        kinds.setdefault(re.sub(r"\d+", "#", text), []).append(text)
    return [f"{some[0]} (and {len(some) - 1} like it)" if len(some) > 1 else some[0] for some in kinds.values()]


def _remarks(group: Group, findings: Sequence[Finding], splits: Sequence[Split]) -> list[str]:
    said = (note for f in findings if f.triggers for note in f.spec.notes(f.line.budget))
    remarks = [f"Warning: {note}" for note in dict.fromkeys(said)]
    if DENSE not in group.rows:
        remarks.append("dense was not run here, so there is no paired recall.")
    elif not any(group.correct(DENSE)):
        remarks.append("dense answers nothing here, so there is no paired recall: the model cannot do this task.")
    split = {(s.policy, s.budget) for s in splits}
    remarks += [
        f"{f.label}: no split of its lift, which needs top-k on its scorer and its matched control."
        for f in findings
        if f.spec.router and not f.spec.control and f.variant not in split
    ]
    remarks += [
        f"{s.policy}@{s.budget}: its matched control kept {s.worst_mismatch:.2%} more or less than it on the worst "
        f"example, beyond the {TOLERANCE:.1%} we allow: read its split with care."
        for s in splits
        if not s.sound
    ]
    return remarks


def _gaps(group: Group, a: Variant, b: Variant) -> dict[str, float]:
    """Returns, by example, how much more the first policy scored over all questions."""
    pairs = zip(group.rows[a], group.rows[b], strict=True)
    return {x.run.example: _total(x) - _total(y) for x, y in pairs}


def _total(row: Row) -> float:
    return float(sum(answer["score"] for answer in row.run.answers))
