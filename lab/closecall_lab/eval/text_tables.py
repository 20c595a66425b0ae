"""What `closecall eval` prints of texts: how far every policy's predictions are from dense attention's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from closecall.registry import unknown

from ..spine.numbers import known_mean, plural
from ..spine.table import Column, Table
from . import statistics
from .summary import KEPT, Group, Variant, label, where

MEASURES = {"kl": "KL to dense, in nats", "loss_change": "change in loss", "agreement": "agreement of the first choice"}


def is_text(group: Group) -> bool:
    """Whether the group's examples are texts without questions."""
    return any("kl" in answer for rows in group.rows.values() for row in rows for answer in row.run.answers)


def values(group: Group, variant: Variant, measure: str) -> list[float]:
    """One value for each text: the unit of all statistics."""
    return list(by_text(group, variant, measure).values())


def by_text(group: Group, variant: Variant, measure: str) -> dict[str, float]:
    """The values by the text they are of."""
    if measure not in MEASURES:
        raise unknown("measure of a text", measure, MEASURES)
    answers = {row.run.example: row.run.answers[0] for row in group.rows[variant]}
    return {t: a["loss"] - a["dense_loss"] if measure == "loss_change" else a[measure] for t, a in answers.items()}


def lines(group: Group) -> list[dict[str, Any]]:
    """A line for each policy: every measure with its interval over texts, and what the policy kept."""
    rows = []
    for line in group.lines():
        variant = (line.policy, line.budget)
        texts = [values(group, variant, measure) for measure in MEASURES]
        estimates = (statistics.clustered(v, range(len(v))) for v in texts)
        parts = [row.run.answers[0]["kl_by_part"] for row in group.rows[variant]]
        by_part = [known_mean(part) for part in zip(*parts, strict=True)]
        rows.append(vars(line) | dict(zip(MEASURES, estimates, strict=True)) | {"kl_by_part": by_part})
    return rows


def tables(group: Group, name: str) -> list[Table]:
    """What `closecall eval` prints of a group of texts."""
    if not group.rows:
        return []
    notes = [f"Warning: {w}" for w in group.warnings]
    if group.left_out:
        notes.append(f"{plural(group.left_out, 'text')} left out, because some policy has not run them yet.")
    pairs = [(a, b) for a, b in group.pairs() if a in group.rows and b in group.rows]
    return compared(group, f"{where(group.task, group.context)} on {name}: {sample(group)}", pairs, notes)


def sample(group: Group) -> str:
    runs = [row.run for row in next(iter(group.rows.values()))]
    return f"{plural(len(runs), 'text')}, {sum(run.answers[0]['positions'] for run in runs):,} positions"


def compared(
    group: Group, title: str, pairs: Sequence[tuple[Variant, Variant]], notes: Sequence[str] = ()
) -> list[Table]:
    """Policies against dense, these pairs against each other, and all of them along the text."""
    rows = lines(group)
    made = [Table(title, _LINE, rows, (*_NOTES, *notes))]
    if pairs:
        made.append(Table("Between policies: KL to dense", _COMPARISON, _compare(group, pairs), _TESTS))
    parts = len(rows[0]["kl_by_part"])
    columns = [*KEPT[:2]]
    columns += [Column(f"{i + 1}/{parts}", partial(_part, i), ".4f") for i in range(parts)]
    made.append(Table("KL to dense along the text", columns, rows, ("each column is a part of the text, in order",)))
    return made


def _part(i: int, row: dict[str, Any]) -> float | None:
    found: float | None = row["kl_by_part"][i]
    return found


def _compare(group: Group, pairs: Sequence[tuple[Variant, Variant]]) -> list[dict[str, Any]]:
    compared: list[dict[str, Any]] = []
    for a, b in pairs:
        difference = [x - y for x, y in zip(values(group, a, "kl"), values(group, b, "kl"), strict=True)]
        better = sum(d < 0 for d in difference)
        compared.append(
            {
                "a": label(a),
                "b": label(b),
                "difference": statistics.clustered(difference, range(len(difference))),
                "better": better,
                "worse": sum(d > 0 for d in difference),
                "p": statistics.sign_flips(difference),
            }
        )
    corrected = statistics.holm([c["p"] for c in compared])
    return [c | {"p": p} for c, p in zip(compared, corrected, strict=True)]


# Four digits behind the point, because texts differ by little.
_LINE = (
    *KEPT,
    Column("KL", lambda r: r["kl"].text(".4f")),
    Column("loss change", lambda r: r["loss_change"].text(".4f")),
    Column("agreement", lambda r: r["agreement"].text(".4f")),
    Column("seconds", "wall", ".1f"),
)
_NOTES = (
    "KL: KL(dense || policy) over the vocabulary, in nats; loss change: of the text's own next token;",
    "agreement: positions where the likeliest token is dense's. Means over positions; 95% by bootstrap over texts;",
    "effective: measured kept blocks a tile; kept: of the blocks that tiles see.",
)
_COMPARISON = (
    Column("policy", "a", left=True),
    Column("against", "b", left=True),
    Column("difference", lambda r: r["difference"].text(".4f")),
    Column("nearer", "better"),
    Column("farther", "worse"),
    Column("p", spec=".3g"),
)
_TESTS = ("p: sign flips of whole texts, Holm-corrected over this table; below zero the first is nearer to dense.",)
