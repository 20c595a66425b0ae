"""The ring's findings as tables for a terminal and Markdown, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ...spine.numbers import p_text, three_digits
from ...spine.table import Column, Table
from ..matched import TOLERANCE
from ..summary import Group, Line, where
from .cost import Cost
from .ring import LEVEL, Answers, Bout, Captured, Duel, Score, Tally

FAIR = f"A policy that keeps over {TOLERANCE:.1%} more than its rival on some example is shown, and not tested."
KEEPS = "keeps: blocks, of those its rival keeps, as measured."
VERDICT = f"better, worse: Holm-corrected p below {LEVEL:g}, by sign flips of whole contexts."


def _signed(value: float | None) -> str | None:
    return None if value is None else f"{value:+.3f}"


def line_table(group: Group, name: str, part: str) -> Table:
    """Accuracy at the measured budget: a row for each policy."""
    lines: list[Line] = group.lines()
    columns = (
        Column("policy", left=True),
        Column("budget", lambda r: r.budget or None),
        Column("tile budget"),
        Column("measured", "effective_budget", ".2f"),
        Column("kept", "kept_fraction", ".0%"),
        Column("accuracy"),
        Column("score"),
        Column("hit", spec=".2f"),
        Column("union", "hit_union", ".2f"),
    )
    some = next(iter(group.rows.values()))
    title = f"{where(group.task, group.context)} on {name}, the {part} part: "
    title += f"{len(some)} examples, {len(group.clusters)} questions"
    notes = [
        "measured: kept blocks a tile; accuracy: Wilson 95%; score: bootstrap 95% over contexts;",
        "hit: gold blocks kept, over heads and layers; union: kept by any head of a layer.",
        *(f"Warning: {w}" for w in group.warnings),
    ]
    return Table(title, columns, lines, notes)


_WHO = (
    Column("policy", left=True),
    Column("against", left=True),
    Column("budget"),
    Column("keeps", "spent.mean", ".1%"),
)


def duel_table(duels: Sequence[Duel], title: str) -> Table:
    columns = (
        *_WHO,
        Column("difference", "comparison.difference"),
        Column("wins", "comparison.wins"),
        Column("losses", "comparison.losses"),
        Column("p", lambda r: r.comparison and p_text(r.comparison.cluster)),
        Column("Holm", lambda r: r.comparison and p_text(r.comparison.cluster_holm)),
        Column("verdict", left=True),
    )
    notes = (f"{KEEPS} wins: questions only the policy answers.", FAIR, VERDICT)
    return Table(title, columns, duels, notes)


def cost_table(costs: Sequence[Cost], what: str) -> Table:
    columns = (
        Column("policy", left=True),
        Column("budget"),
        Column("tile budget"),
        Column("vectors a block", "vectors", "g"),
        Column("ms", lambda r: three_digits(r.milliseconds)),
        Column("x quest", lambda r: three_digits(r.ratio)),
    )
    notes = (
        "ms: median time of select alone; x quest: median over rounds of the ratio to quest's top-k in the same round.",
        "vectors a block: of the key's length, stored by the scorer.",
    )
    return Table(f"What choosing costs: {what}", columns, costs, notes)


_SCORE = (
    Column("policy", left=True),
    Column("budget", lambda r: r.budget or None),
    Column("measured", "effective_budget", ".2f"),
    Column("mass", spec=".4f"),
    Column("error", spec=".4f"),
    Column("hit", spec=".3f"),
    Column("union", spec=".3f"),
    Column("gold mass", "gold", ".3f"),
)
_QUALITY = (
    "mass: softmax mass in kept blocks, mean over rows and heads; error: of the output, 2-norm relative to dense;",
    "hit: (gold block, head) pairs kept by the tile that asks; union: gold blocks kept by any head. Means over layers.",
    "gold mass: of the mass that the rows that ask put on gold blocks, over all heads and layers, the share kept.",
)


def score_table(scores: Sequence[Score], title: str) -> Table:
    return Table(title, _SCORE, scores, _QUALITY)


def bout_table(bouts: Sequence[Bout], title: str) -> Table:
    columns = (
        *_WHO,
        Column("error", lambda r: f"{r.error.value:+.4f}" if r.spent.fair else None),
        Column("wins", lambda r: r.wins if r.spent.fair else None),
        Column("losses", lambda r: r.losses if r.spent.fair else None),
        Column("Holm p", lambda r: p_text(r.p) if r.spent.fair else None),
        Column("hit", lambda r: _signed(r.hit) if r.spent.fair else None),
        Column("Holm p", lambda r: p_text(r.p_hit) if r.spent.fair else None),
        Column("gold mass", lambda r: _signed(r.gold) if r.spent.fair else None),
        Column("Holm p", lambda r: p_text(r.p_gold) if r.spent.fair else None),
        Column("verdict by error", "verdict", left=True),
    )
    notes = (f"{KEEPS} error, hit, gold mass: differences; a smaller error wins the prompt.", FAIR, VERDICT)
    return Table(title, columns, bouts, notes)


_BY_LAYER = (("Mass", "mass", ".4f"), ("Error", "error", ".4f"), ("Hit", "hit", ".3f"), ("Gold mass", "gold", ".3f"))
_OF_ALL = "of all: the layer's part of the mass on gold blocks over all layers. Where it is small, little can be lost."


def layer_tables(captured: Captured) -> list[Table]:
    """Makes a table for every budget and measure: layers down, policies across."""
    by_layer = {layer: captured.scores(layer=layer) for layer in captured.layers}
    there = {layer: next((s.gold_there for s in scores), None) for layer, scores in by_layer.items()}
    whole = sum(x for x in there.values() if x)
    tables = []
    for budget in sorted({s.budget for scores in by_layer.values() for s in scores if s.budget}):
        names = list(dict.fromkeys(s.policy for s in by_layer[captured.layers[0]] if s.budget == budget))
        for title, measure, spec in _BY_LAYER:
            rows: list[dict[str, Any]] = [
                {"layer": layer} | {s.policy: getattr(s, measure) for s in scores if s.budget == budget}
                for layer, scores in by_layer.items()
            ]
            if all(row[name] is None for row in rows for name in names):
                continue  # nothing here has gold
            columns = [Column("layer")]
            if measure == "gold":
                columns.append(Column("of all", lambda r: (there[r["layer"]] or 0.0) / whole, ".1%"))
            columns += [Column(name, lambda r, name=name: r[name], spec) for name in names]  # type: ignore[misc]
            notes = (_OF_ALL,) if measure == "gold" else ()
            tables.append(Table(f"{title} by layer, budget {budget}", columns, rows, notes))
    return tables


def captured_tables(captured: Captured, what: str) -> list[Table]:
    title = f"{what}: {captured.prompts} prompts, {len(captured.layers)} layers"
    tables = [score_table(captured.scores(), title), bout_table(captured.bouts[None], "Between policies, all texts")]
    for task in captured.tasks if len(captured.tasks) > 1 else ():
        tables.append(score_table(captured.scores(task=task), f"Captured prompts of {task}"))
        tables.append(bout_table(captured.bouts[task], f"Between policies on {task}"))
    return [table for table in tables if table.rows]


def tally_table(tallies: Sequence[Tally], title: str) -> Table:
    """Accuracy over all models: policies down, tasks across."""
    tasks = list(tallies[0].accuracy)
    columns = (
        Column("policy", left=True),
        Column("budget", lambda r: r.budget or None),
        Column("measured", "effective_budget", ".2f"),
        *(Column(task, lambda r, task=task: str(r.accuracy[task])) for task in tasks),  # type: ignore[misc]
    )
    return Table(title, columns, tallies, ("accuracy over all models, Wilson 95%; measured: kept blocks a tile.",))


def answer_tables(answers: Answers, part: str) -> list[Table]:
    tables = []
    for context in dict.fromkeys(t.context for t in answers.tallies) if len(answers.groups) > 1 else ():
        mine = [t for t in answers.tallies if t.context == context]
        models = len({g.model for g in answers.groups})
        title = where(f"All {models} models" if models > 1 else "All tasks", context).rstrip(",") + f", the {part} part"
        tables.append(tally_table(mine, title))
    for group, duels in zip(answers.groups, answers.duels, strict=True):
        tables.append(line_table(group, answers.names[group.model], part))
        tables.append(
            duel_table(duels, f"Between policies: {where(group.task, group.context)} on {answers.names[group.model]}")
        )
    for (task, context), duels in answers.over_models.items():
        tables.append(duel_table(duels, f"Between policies, all models: {where(task, context)}"))
    if answers.overall:
        tables.append(duel_table(answers.overall, "Between policies, all of the above"))
    return [table for table in tables if table.rows]


def as_json(settings: dict[str, Any], answers: Answers | None, captured: Captured | None, costs: Sequence[Cost]) -> str:
    """Everything measured, for other programs."""
    data: dict[str, Any] = {"closecall_compare": 1, "settings": settings, "costs": _plain(costs)}
    if answers is not None:
        data["answers"] = [
            {
                "model": answers.names[g.model],
                "fingerprint": g.model,
                "task": g.task,
                "context": g.context,
                "policies": _plain(g.lines()),
                "duels": _judged(duels),
            }
            for g, duels in zip(answers.groups, answers.duels, strict=True)
        ]
        data["tallies"] = _plain(answers.tallies)
        data["over_models"] = [
            {"task": task, "context": context, "duels": _judged(duels)}
            for (task, context), duels in answers.over_models.items()
        ]
        data["overall"] = _judged(answers.overall)
    if captured is not None:
        data["captured"] = {
            "prompts": captured.prompts,
            "all": _scores(captured),
            "by_task": {task: _scores(captured, task=task) for task in captured.tasks},
            "by_layer": {str(n): _plain(captured.scores(layer=n)) for n in captured.layers},
        }
    return json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"


def _scores(captured: Captured, task: str | None = None) -> dict[str, Any]:
    return {"policies": _plain(captured.scores(task=task)), "bouts": _judged(captured.bouts[task])}


def _plain(records: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(record) for record in records]


def _judged(pairs: Sequence[Duel | Bout]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(pair) | {"verdict": pair.verdict} for pair in pairs]


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and value - value != 0 else value


def markdown(settings: dict[str, Any], tables: Sequence[Table]) -> str:
    """The settings and all tables on one page."""
    listed = "\n".join(f"- {key}: {value}" for key, value in settings.items())
    return f"# Selectors at equal measured budget\n\n{listed}\n\n" + "\n".join(table.markdown(2) for table in tables)
