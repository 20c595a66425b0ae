"""Turns stored runs into findings: per policy and budget, between policies, and the split of a router's lift."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from closecall.presets import PRESETS, composed, parts_of

from ..spine.numbers import known_mean
from ..spine.table import Column, Table
from ..tasks.longbench import LETTERS
from ..tasks.scoring import choice_in
from . import statistics
from .kept import mean
from .matched import TOLERANCE, Applied
from .spec import CONTROLS, Spec, title
from .statistics import Comparison, Decomposition, Estimate
from .store import Row, Store

Variant = tuple[str, int]  # policy and budget


@dataclass(frozen=True)
class Line:
    """One policy at one budget, everything measured."""

    policy: str
    budget: int
    tile_budget: float | None
    examples: int
    accuracy: Estimate  # Wilson, questions taken as independent
    score: Estimate  # mean score, bootstrap over contexts
    paired: Estimate | None  # of the questions that dense answers, the share answered too
    effective_budget: float
    kept_fraction: float
    trigger_rate: float | None  # None of a policy that triggers no tiles, and so is the next
    asked_triggered: float | None
    hit: float | None
    hit_union: float | None
    by_logits: Estimate | None  # of a multiple choice: the likeliest letter instead of the generated one
    no_letter: float | None  # and the share of generated answers that settle on none: failures of form, not of reading
    wall: float


@dataclass(frozen=True)
class Split:
    """A router's lift, and how near its control came to its budget on the worst example."""

    policy: str
    budget: int
    parts: Decomposition
    worst_mismatch: float

    @property
    def sound(self) -> bool:
        return self.worst_mismatch <= TOLERANCE


@dataclass(frozen=True)
class Group:
    """All policies on the same examples of one model, task and context."""

    model: str
    task: str
    context: int
    rows: dict[Variant, list[Row]]  # the same examples in the same order for all
    left_out: int  # examples that some policy has not run yet

    @cached_property
    def clusters(self) -> list[int]:
        """The context each question shares with others, by number."""
        some = next(iter(self.rows.values()))
        return [i for i, row in enumerate(some) for _ in row.run.answers]

    @cached_property
    def shared(self) -> bool:
        """Whether questions share contexts."""
        return len(set(self.clusters)) < len(self.clusters)

    def correct(self, variant: Variant) -> list[int]:
        return [int(a["correct"]) for row in self.rows[variant] for a in row.run.answers]

    def paired(self, variant: Variant) -> Estimate:
        return statistics.paired_recall(self.correct(("dense", 0)), self.correct(variant), self.clusters)

    def letters(self, variant: Variant) -> list[int]:
        """Whether the likeliest letter of each multiple choice was the right one. Empty for other tasks."""
        answers = [a for row in self.rows[variant] for a in row.run.answers]
        return [int(a["choice_correct"]) for a in answers if "choice_correct" in a]

    def scores(self, variant: Variant) -> list[float]:
        return [a["score"] for row in self.rows[variant] for a in row.run.answers]

    @property
    def warnings(self) -> list[str]:
        rows = itertools.chain.from_iterable(self.rows.values())
        return list(dict.fromkeys(w for row in rows for w in row.run.warnings))

    def lines(self) -> list[Line]:
        return [self._line(variant) for variant in self.rows]

    def _line(self, variant: Variant) -> Line:
        rows = self.rows[variant]
        runs = [row.run for row in rows]
        answers = [a for run in runs for a in run.answers]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of budgets that decide nothing: told when they were run
            rule = Applied.from_json(runs[0].policy).policy.rule
        correct = self.correct(variant)
        letters = self.letters(variant)
        triggers = Spec.parse(variant[0]).triggers
        return Line(
            *variant,
            tile_budget=rule.tile_budget if "/matched" not in variant[0] else None,
            examples=len(rows),
            accuracy=statistics.wilson(correct),
            score=statistics.clustered(self.scores(variant), self.clusters),
            paired=self.paired(variant) if ("dense", 0) in self.rows else None,
            effective_budget=mean([run.effective_budget for run in runs]),
            kept_fraction=mean([run.kept_fraction for run in runs]),
            trigger_rate=known_mean(x for run in runs for x in run.layers["trigger_rate"]) if triggers else None,
            asked_triggered=mean([a["asked_triggered"] for a in answers]) if triggers else None,
            hit=known_mean(a.get("hit") for a in answers),
            hit_union=known_mean(a.get("hit_union") for a in answers),
            by_logits=statistics.wilson(letters) if letters else None,
            no_letter=mean([_unformatted(a) for a in answers]) if letters else None,
            wall=mean([run.wall for run in runs]),
        )

    def comparisons(self, pairs: Sequence[tuple[Variant, Variant]] | None = None) -> list[Comparison]:
        """One Holm family: by default every router against top-k at its budget and against its controls."""
        chosen = [p for p in (pairs or self.pairs()) if p[0] in self.rows and p[1] in self.rows]
        named = {label(v): v for pair in chosen for v in pair}
        return statistics.compare(
            {name: self.correct(v) for name, v in named.items()},
            [(label(a), label(b)) for a, b in chosen],
            self.clusters,
            scores={name: self.scores(v) for name, v in named.items()},
        )

    def _routers(self) -> list[tuple[Spec, int]]:
        specs = [(Spec.parse(policy), budget) for policy, budget in self.rows]
        return [(s, b) for s, b in specs if s.router and not s.control]

    def pairs(self) -> list[tuple[Variant, Variant]]:
        """Every router with its rivals: top-k on its scorer, and its controls."""
        pairs = []
        for spec, budget in self._routers():
            rivals = [plain(spec), *(replace(spec, control=c) for c in CONTROLS)]
            pairs += [((str(spec), budget), (str(rival), budget)) for rival in rivals]
        return pairs

    def splits(self) -> list[Split]:
        listed = []
        for spec, budget in self._routers():
            top, control = plain(spec), replace(spec, control="matched")
            router, topk, matched = ((str(s), budget) for s in (spec, top, control))
            if topk not in self.rows or matched not in self.rows:
                continue
            scores = [self.scores(variant) for variant in (router, topk, matched)]
            parts = statistics.decompose(scores[0], scores[1], scores[2], self.clusters)
            pairs = zip(self.rows[router], self.rows[matched], strict=True)
            worst = max(abs(m.run.effective_budget / r.run.effective_budget - 1) for r, m in pairs)
            listed.append(Split(*router, parts, worst))
        return listed


def where(task: str, context: int) -> str:
    """A task and its context; 0 is the context of documents that have their own lengths."""
    return f"{task} at {context} tokens" if context else f"{task}, documents of their own lengths,"


def label(variant: Variant) -> str:
    name, budget = variant
    return f"{title(name)}@{budget}" if budget else title(name)


def plain(spec: Spec) -> Spec:
    """Top-k on the router's scorer, on the same grid."""
    scorer, _ = parts_of(spec.preset)
    name = composed(scorer, "topk")
    kept = tuple((k, v) for k, v in spec.overrides if k not in ("q", "rho", "trigger", "threshold", "seed", "saved"))
    return Spec(name, "", kept)


def on_its_grid(preset: str, spec: Spec) -> Spec:
    """One of the paper's policies with this one's blocks, tiles and tile budget."""
    return Spec(preset, "", tuple((k, v) for k, v in spec.overrides if k in ("block", "tile", "sinks", "tile_factor")))


def _unformatted(answer: dict[str, Any]) -> bool:
    """Whether a multiple choice was answered without a letter. Runs stored before that was recorded say it in words."""
    known: bool | None = answer.get("unformatted")
    return choice_in(answer["output"], LETTERS) is None if known is None else known


def groups(
    store: Store, *, variants: Collection[Variant] | None = None, n: int | None = None, **where: Any
) -> list[Group]:
    """Groups runs by model, task and context, with the examples that every policy there has run.

    Only of these policies, and of the first n examples, if that is said; `where` is as `Store.rows` takes it.
    """
    by_place: dict[tuple[str, str, int], dict[Variant, dict[str, Row]]] = {}
    for row in store.rows(**where):
        cell = row.cell
        variant = (cell.policy, cell.budget)
        if (variants is None or variant in variants) and (n is None or cell.number < n):
            listed = by_place.setdefault((cell.model, cell.task, cell.context), {})
            listed.setdefault(variant, {}).setdefault(row.run.example, row)
    return [_group(*key, listed) for key, listed in by_place.items()]


def _group(model: str, task: str, context: int, variants: dict[Variant, dict[str, Row]]) -> Group:
    """Pairs runs by what the example was, not by its number: a task may have changed, and seeds may give the same."""
    common = set.intersection(*(set(rows) for rows in variants.values()))
    everyone = set.union(*(set(rows) for rows in variants.values()))
    order = [example for example in next(iter(variants.values())) if example in common]  # by seed and number
    rows = {v: [variants[v][example] for example in order] for v in sorted(variants, key=_order)} if common else {}
    return Group(model, task, context, rows, len(everyone) - len(common))


def _order(variant: Variant) -> tuple[int, int, str]:
    preset = variant[0].partition(":")[0].partition("/")[0]
    known = list(PRESETS)
    return variant[1], known.index(preset) if preset in known else len(known), variant[0]


def tables(group: Group, name: str) -> list[Table]:
    """What `closecall eval` prints of a group: policies, comparisons, splits."""
    if not group.rows:
        return []
    first = group.rows[next(iter(group.rows))]
    title = f"{where(group.task, group.context)} on {name}: {len(first)} examples, {len(group.clusters)} questions"
    notes = [f"Warning: {w}" for w in group.warnings]
    if group.left_out:
        notes.append(f"{group.left_out} examples are left out, because some policy has not run them yet.")
    lines = group.lines()
    about = (*_NOTES, _LETTERS) if any(line.by_logits for line in lines) else _NOTES
    made = [Table(title, _LINE, [vars(line) for line in lines], (*about, *notes))]
    comparisons = group.comparisons()
    if comparisons:
        made.append(Table("Between policies", _COMPARISON, comparisons, _TESTS))
    splits = group.splits()
    if splits:
        notes = [
            f"{s.policy}@{s.budget}: the control's budget is off by {s.worst_mismatch:.2%} on the worst example"
            for s in splits
            if not s.sound
        ]
        made.append(Table("Where the router's lift comes from", _SPLIT, splits, (*_LIFT, *notes)))
    return made


KEPT = (
    Column("policy", lambda r: title(r["policy"]), left=True),
    Column("budget", lambda r: r["budget"] or None),
    Column("tile budget"),
    Column("effective", "effective_budget", ".1f"),
    Column("kept", "kept_fraction", ".0%"),
)
_LINE = (
    *KEPT,
    Column("accuracy"),
    Column("score"),
    Column("by logits"),
    Column("no letter", spec=".0%"),
    Column("paired", "paired.value", ".2f"),
    Column("n_dc", "paired.n"),
    Column("triggered", "trigger_rate", ".0%"),
    Column("asked tile", "asked_triggered", ".0%"),
    Column("hit", spec=".2f"),
    Column("union", "hit_union", ".2f"),
    Column("seconds", "wall", ".2f"),
)
_NOTES = (
    "accuracy: Wilson 95%, questions taken as independent; score: bootstrap 95% over contexts;",
    "effective: measured kept blocks a tile; paired: of the n_dc questions dense answers, the share answered too;",
    "triggered: share of tiles that could be; asked tile: of those that hold a question;",
    "hit: gold blocks kept, over heads and layers; union: kept by any head of a layer.",
)
_LETTERS = "by logits: accuracy of the likeliest letter; no letter: generated answers that settle on none."
_COMPARISON = (
    Column("policy", "a", left=True),
    Column("against", "b", left=True),
    Column("difference"),
    Column("wins"),
    Column("losses"),
    Column("McNemar", "mcnemar_holm", ".3g"),
    Column("sign", "sign_holm", ".3g"),
    Column("contexts", "cluster_holm", ".3g"),
)
_TESTS = (
    "p-values are Holm-corrected over this table. McNemar: exact, two-sided; sign: one-sided, the first is better;",
    "both take questions as independent. contexts: sign flips of whole contexts, which do not.",
)
_SPLIT = (
    Column("policy", left=True),
    Column("budget"),
    Column("lift over top-k", "parts.lift"),
    Column("= budget", "parts.budget"),
    Column("+ selectivity", "parts.selectivity"),
    Column("mismatch", "worst_mismatch", ".2%"),
)
_LIFT = ("budget: uniform top-k that keeps as much as the router did, over top-k; selectivity: the router over that.",)
