"""The ring: policies on the same examples, compared only where a policy read no more than its rival.

Answers come from the evaluation's store, and captured layers from `quality`. In both, a pair is fair if the policy
kept, as measured, at most half a percent more blocks than its rival on every example. If it kept
fewer, the verdict says so. Other pairs are shown, and left out of the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...spine.numbers import known_mean
from .. import runner, statistics, summary
from ..grid import Grid, Job
from ..matched import TOLERANCE
from ..spec import Spec
from ..statistics import Comparison, Estimate
from ..store import Store
from ..summary import Group, Variant
from .quality import Row, belongs, check_part, numbers, share

LEVEL = 0.05  # Holm-corrected: below it a difference is called one


@dataclass(frozen=True)
class RingGrid(Grid):
    """A grid on one part of the examples: `n` of them, those with the part's numbers."""

    part: str = "choose"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_part(self.part)

    def jobs(self) -> list[Job]:
        return [
            Job(task, context, self.seed, number, tuple(self.variants))
            for number in numbers(self.part, self.n)
            for task, context in self.places
        ]


def entrants(policies: Sequence[Spec], against: Sequence[Spec]) -> list[Spec]:
    """Lists all policies to run: every router brings the control that spends as much as it did."""
    listed = [*policies, *against]
    listed += [dataclasses.replace(s, control="matched") for s in listed if s.router and not s.control]
    return list(dict.fromkeys(listed))


@dataclass(frozen=True)
class Spent:
    """How much a policy kept relative to its rival: over all examples, and on the two extreme ones."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, mine: Sequence[float], theirs: Sequence[float]) -> Spent:
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        return cls(sum(mine) / sum(theirs), min(ratios), max(ratios))

    @property
    def fair(self) -> bool:
        """Whether the policy kept no more than its rival on any example."""
        return self.most <= 1 + TOLERANCE

    @property
    def equal(self) -> bool:
        return self.fair and self.least >= 1 - TOLERANCE

    def verdict(self, p: float, better: bool) -> str:
        if not self.fair:
            return f"keeps up to {self.most - 1:.1%} more"
        found = "no difference shown" if p >= LEVEL else "better" if better else "worse"
        return found if self.equal else f"{found}, with {self.mean:.0%} of the blocks"


@dataclass(frozen=True)
class Duel:
    """One policy against another at one budget."""

    policy: str
    against: str
    budget: int
    spent: Spent
    comparison: Comparison | None  # None where it kept more than the other

    @property
    def verdict(self) -> str:
        found = self.comparison
        if found is None:
            return self.spent.verdict(1.0, better=False)
        return self.spent.verdict(found.cluster_holm, found.difference.value > 0)


Pair = tuple[str, str, int]  # policy, against, budget


def pairs(variants: Sequence[Variant], against: Sequence[str]) -> list[Pair]:
    """Every policy against every baseline at the same budget, and every router against its matched control."""
    there = set(variants)
    listed = [
        (policy, rival, budget)
        for policy, budget in variants
        for rival in against
        if budget and rival != policy and (rival, budget) in there
    ]
    for policy, budget in variants:
        spec = Spec.parse(policy)
        rival = str(dataclasses.replace(spec, control="matched"))
        if spec.router and not spec.control and (rival, budget) in there:
            listed.append((policy, rival, budget))
    return list(dict.fromkeys(listed))


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tally:
    """One policy at one budget and context over all models."""

    policy: str
    budget: int
    context: int
    effective_budget: float
    accuracy: dict[str, Estimate]  # by task; Wilson, questions taken as independent


@dataclass(frozen=True)
class Answers:
    """What a grid's policies answered, task by task and context by context, on one part of the examples."""

    groups: list[Group]
    names: dict[str, str]  # of models, by fingerprint
    against: list[str]

    @cached_property
    def duels(self) -> list[list[Duel]]:
        """The duels of every group by itself."""
        return [duels([group], self.against) for group in self.groups]

    @cached_property
    def tallies(self) -> list[Tally]:
        """A tally for every policy that ran everywhere at its context, in the order in which policies entered."""
        listed = []
        for context in dict.fromkeys(g.context for g in self.groups):
            here = [g for g in self.groups if g.context == context]
            for variant in here[0].rows:
                if not all(variant in g.rows for g in here):
                    continue
                correct: dict[str, list[int]] = {}
                for g in here:
                    correct.setdefault(g.task, []).extend(g.correct(variant))
                kept = _budgets(here, variant)
                accuracy = {task: statistics.wilson(answers) for task, answers in correct.items()}
                listed.append(Tally(*variant, context, sum(kept) / len(kept), accuracy))
        return listed

    @cached_property
    def over_models(self) -> dict[tuple[str, int], list[Duel]]:
        """The duels of every task and context over all models; empty where there is only one model."""
        places: dict[tuple[str, int], list[Group]] = {}
        for group in self.groups:
            places.setdefault((group.task, group.context), []).append(group)
        return {place: duels(groups, self.against) for place, groups in places.items() if len(groups) > 1}

    @cached_property
    def overall(self) -> list[Duel]:
        """The duels over all models, tasks and contexts; empty if there is only one group."""
        if len(self.groups) < 2:
            return []
        return duels(self.groups, self.against)


def answers(grid: RingGrid, store: Store, against: Sequence[Spec], *, jobs: int = 1) -> Answers:
    """Runs what the store does not have yet, and reads the grid's part of it."""
    models = runner.run(grid, store, jobs=jobs)
    wanted = {(str(spec), budget) for spec, budget in grid.variants}
    last = numbers(grid.part, grid.n)[-1]
    parts: list[Group] = []
    for model in models:
        for task, context in grid.places:
            where = {"model": model, "task": task, "context": context, "seed": grid.seed}
            groups = summary.groups(store, variants=wanted, n=last + 1, **where)
            parts += [_part_of(group, grid.part) for group in groups]
    names = {fingerprint: str(facts["name"]) for fingerprint, facts in store.models().items()}
    return Answers([g for g in parts if g.rows], names, [str(s) for s in against])


def _part_of(group: Group, part: str) -> Group:
    rows = {v: [row for row in listed if belongs(row.cell.number, part)] for v, listed in group.rows.items()}
    return dataclasses.replace(group, rows={v: listed for v, listed in rows.items() if listed}, left_out=0)


def duels(groups: Sequence[Group], against: Sequence[str]) -> list[Duel]:
    """Tests all pairs on all these groups as one Holm family; contexts are drawn and flipped whole."""
    common = [v for v in groups[0].rows if all(v in g.rows for g in groups)]
    listed = pairs(common, against)
    spent = {(a, b, k): Spent.of(_budgets(groups, (a, k)), _budgets(groups, (b, k))) for a, b, k in listed}
    fair = [p for p in listed if spent[p].fair]
    used = {(name, budget) for a, b, budget in fair for name in (a, b)}
    clusters: list[Hashable] = [(i, c) for i, g in enumerate(groups) for c in g.clusters]
    tested = statistics.compare(
        {summary.label(v): [x for g in groups for x in g.correct(v)] for v in used},
        [(summary.label((a, k)), summary.label((b, k))) for a, b, k in fair],
        clusters,
        scores={summary.label(v): [x for g in groups for x in g.scores(v)] for v in used},
    )
    results = dict(zip(fair, tested, strict=True))
    return [Duel(*p, spent=spent[p], comparison=results.get(p)) for p in listed]


def _budgets(groups: Sequence[Group], variant: Variant) -> list[float]:
    return [row.run.effective_budget for group in groups for row in group.rows[variant]]


# -- captured layers ---------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Row], float | None]] = {
    "mass": lambda row: row.quality.mass,
    "error": lambda row: row.quality.error,
    "hit": lambda row: row.quality.hit,
    "union": lambda row: row.quality.union,
}


@dataclass(frozen=True)
class Score:
    """One policy at one budget on captured layers: means over rows of what was found.

    gold: of all the softmax mass on gold blocks, over prompts, layers and heads (`gold_there`), the share in kept ones.
    """

    policy: str
    budget: int
    effective_budget: float
    mass: float | None
    error: float | None
    hit: float | None
    union: float | None
    gold: float | None
    gold_kept: float | None
    gold_there: float | None


@dataclass(frozen=True)
class Bout:
    """One policy against another on captured prompts, by output error, gold hits and gold mass.

    wins, losses: prompts with the smaller and with the larger error; p: sign flips of whole prompts, Holm-corrected.
    """

    policy: str
    against: str
    budget: int
    spent: Spent
    error: Estimate  # the difference of mean errors over layers: negative is better
    wins: int
    losses: int
    p: float
    hit: float | None  # the difference of mean hits: positive is better
    p_hit: float | None
    gold: float | None  # the difference of the prompts' mean shares of gold mass: positive is better
    p_gold: float | None

    @property
    def verdict(self) -> str:
        return self.spent.verdict(self.p, self.error.value < 0)


@dataclass(frozen=True)
class Captured:
    """Qualities on captured layers, and the comparisons they allow."""

    rows: list[Row]
    against: list[str]

    @cached_property
    def _by(self) -> dict[Variant, list[Row]]:
        by: dict[Variant, list[Row]] = {}
        for row in self.rows:
            by.setdefault((row.policy, row.budget), []).append(row)
        return by

    @property
    def tasks(self) -> list[str]:
        return sorted({row.task for row in self.rows})

    @property
    def layers(self) -> list[int]:
        return sorted({row.layer for row in self.rows})

    @property
    def prompts(self) -> int:
        return len({row.prompt for row in self.rows})

    def scores(self, *, task: str | None = None, layer: int | None = None) -> list[Score]:
        """The qualities of every policy and budget, over all prompts and layers or those of one task or layer."""
        listed = []
        for (policy, budget), rows in self._by.items():
            here = [r for r in rows if task in (None, r.task) and layer in (None, r.layer)]
            if here:
                budgets = [r.quality.effective_budget for r in here]
                means = {name: known_mean(map(read, here)) for name, read in MEASURES.items()}
                kept, there = _gold(here)
                gold = {"gold": share(kept, there), "gold_kept": kept, "gold_there": there}
                listed.append(Score(policy, budget, sum(budgets) / len(budgets), **means, **gold))
        return sorted(listed, key=lambda s: s.budget)

    @cached_property
    def bouts(self) -> dict[str | None, list[Bout]]:
        """Every policy against every baseline at the same budget: on each task, and under None on all prompts."""
        return {task: self._bouts(task) for task in (None, *self.tasks)}

    def _bouts(self, task: str | None) -> list[Bout]:
        """Tests every pair on these rows, Holm-corrected as one family."""
        by = {v: [r for r in rows if task in (None, r.task)] for v, rows in self._by.items()}
        bouts = [_bout(p, by[p[0], p[2]], by[p[1], p[2]]) for p in pairs(list(by), self.against)]
        for name in ("p", "p_hit", "p_gold"):
            tested = [i for i, b in enumerate(bouts) if b.spent.fair and getattr(b, name) is not None]
            corrected = statistics.holm([getattr(bouts[i], name) for i in tested])
            for i, p in zip(tested, corrected, strict=True):
                change: dict[str, Any] = {name: p}
                bouts[i] = dataclasses.replace(bouts[i], **change)
        return bouts


def _gold(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """The sums of gold mass kept and of all there is; None where no row has gold."""
    mine = [r.quality for r in rows if r.quality.gold_there is not None]
    if not mine:
        return None, None
    return sum(x.gold_kept or 0.0 for x in mine), sum(x.gold_there or 0.0 for x in mine)


def _per_prompt(rows: Sequence[Row], read: Callable[[Row], float | None]) -> dict[Hashable, float]:
    """Averages a measure over layers, prompt by prompt."""
    by_prompt: dict[Hashable, list[float]] = {}
    for row in rows:
        value = read(row)
        if value is not None:
            by_prompt.setdefault(row.prompt, []).append(value)
    return {prompt: sum(values) / len(values) for prompt, values in by_prompt.items()}


def _gold_per_prompt(rows: Sequence[Row]) -> dict[Hashable, float]:
    """Returns the kept share of gold mass by prompt; a layer counts by how much mass it has on gold."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(row.prompt, []).append(row)
    shares = {prompt: share(*_gold(listed)) for prompt, listed in found.items()}
    return {prompt: value for prompt, value in shares.items() if value is not None}


def _difference(both: Sequence[dict[Hashable, float]], prompts: Sequence[Hashable]) -> tuple[float, float] | None:
    """The difference between two policies' means and its p-value, over the prompts that have the measure, if any."""
    asked = [p for p in prompts if p in both[1]]
    if not asked:
        return None
    x, y = ([values[p] for p in asked] for values in both)
    return sum(x) / len(x) - sum(y) / len(y), statistics.cluster_test(x, y, asked)


def _bout(pair: Pair, own: Sequence[Row], theirs: Sequence[Row]) -> Bout:
    budgets = [_per_prompt(rows, lambda r: r.quality.effective_budget) for rows in (own, theirs)]
    prompts = sorted(budgets[1], key=repr)
    errors = [_per_prompt(rows, MEASURES["error"]) for rows in (own, theirs)]
    a, b = ([e[p] for p in prompts] for e in errors)
    hit = _difference([_per_prompt(rows, MEASURES["hit"]) for rows in (own, theirs)], prompts)
    gold = _difference([_gold_per_prompt(rows) for rows in (own, theirs)], prompts)
    return Bout(
        *pair,
        spent=Spent.of(*([b[p] for p in prompts] for b in budgets)),
        error=statistics.clustered([p - q for p, q in zip(a, b, strict=True)], prompts),
        wins=sum(p < q for p, q in zip(a, b, strict=True)),
        losses=sum(p > q for p, q in zip(a, b, strict=True)),
        p=statistics.cluster_test(a, b, prompts),
        hit=hit and hit[0],
        p_hit=hit and hit[1],
        gold=gold and gold[0],
        p_gold=gold and gold[1],
    )
