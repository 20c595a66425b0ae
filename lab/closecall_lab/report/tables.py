"""The tables of a report. Every one has its notes on how to read it; a budget never stands without its tile budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..eval.spec import CONTROLS, title
from ..eval.statistics import Comparison, Estimate
from ..eval.summary import Variant
from ..spine.numbers import known_mean, p_text, plural, size
from ..spine.table import NOTHING, Column, Table
from .gather import Finding, Setting, Texts
from .rivals import DENSE, rivals

P_VALUES = "exact McNemar, two-sided"
P_VALUES_SHARED = "by exchanging whole contexts, because questions share them"


def estimate(value: Estimate | None, *, sign: bool = False) -> str | None:
    """0.75 [0.30, 0.95]; nothing where there was nothing to divide by."""
    return None if value is None or math.isnan(value.value) else value.text("+.2f" if sign else ".2f")


def p_values(setting: Setting, test: Comparison) -> tuple[float, float]:
    """Raw and Holm-corrected: McNemar's, or over contexts where questions share them."""
    return (test.cluster, test.cluster_holm) if setting.shared else (test.mcnemar, test.mcnemar_holm)


def _p(setting: Setting, finding: Finding, rival: str) -> str | None:
    test = tested(setting, finding, rival)
    if test is None:
        return None
    raw, holm = p_values(setting, test)
    return f"{p_text(raw)} ({p_text(holm)})"


def tested(setting: Setting, finding: Finding, rival: str) -> Comparison | None:
    """The test of a finding against the one rival that `rivals` calls by that name."""
    other = dict(rivals(finding.variant, setting.kept)).get(rival)
    return None if other is None else setting.test(finding.variant, other)


def where(setting: Setting | Texts) -> str:
    return f"{setting.task} at {size(setting.context)} tokens" if setting.context else setting.task


def sample(setting: Setting) -> str:
    examples, questions = plural(setting.examples, "example"), plural(setting.questions, "question")
    return examples if setting.examples == setting.questions else f"{examples}, {questions}"


def policies(setting: Setting) -> Table:
    """Accuracy and paired recall in the paper's layout: a row for each policy."""
    columns = (
        Column("policy", "spec.title", left=True),
        Column("scorer", left=True),
        Column("budget (tile budget)", "budget_text", left=True),
        Column("effective budget", "line.effective_budget", ".1f"),
        Column("kept", "line.kept_fraction", ".0%"),
        Column("accuracy", lambda f: estimate(f.accuracy)),
        Column("score", lambda f: estimate(f.line.score) if setting.graded else None),
        Column("by logits", lambda f: estimate(f.by_logits)),
        Column("no letter", "line.no_letter", ".0%"),
        Column("n_dc", "paired.n"),
        Column("paired recall", lambda f: estimate(f.paired)),
        Column("p vs dense", lambda f: _p(setting, f, "dense")),
        Column("p vs topk", lambda f: _p(setting, f, "topk")),
        Column("p vs matched", lambda f: _p(setting, f, "matched")),
    )
    interval = "over contexts (bootstrap), because questions share them" if setting.shared else "Wilson's"
    notes = [
        f"{sample(setting)}. Intervals: 95%, {interval}. paired recall: of the n_dc questions dense answers, the share "
        "the policy answers too.",
        "effective budget: blocks a tile kept, measured; kept: of the blocks it could see.",
        f"p-values: {P_VALUES_SHARED if setting.shared else P_VALUES}; in brackets Holm-corrected over all tests of "
        "this setting.",
    ]
    if setting.graded:
        notes.append("score: the mean score; accuracy: the share of questions with full score.")
    if any(f.by_logits for f in setting.findings):
        notes.append("by logits: the likeliest letter as the next token; no letter: answers that settle on none.")
    return Table("Accuracy and paired recall", columns, setting.findings, notes, keys=3)


def tests(setting: Setting) -> Table | None:
    """Policy against policy, with what the p-values come from."""
    labels = {f.variant: f.label for f in setting.findings}
    rows = [vars(c) | {"policy": labels[a], "against": _rival(labels, a, b)} for a, b, c in setting.tests]
    if not rows:
        return None
    shared = setting.shared
    columns = (
        Column("policy", left=True),
        Column("against", left=True),
        Column("difference", lambda r: estimate(r["difference"], sign=True)),
        Column("only policy", "wins"),
        Column("only other", "losses"),
        Column("McNemar p", lambda r: p_text(r["mcnemar"])),
        Column("Holm", lambda r: p_text(r["mcnemar_holm"])),
        Column("sign p, better", lambda r: p_text(r["sign"])),
        Column("Holm", lambda r: p_text(r["sign_holm"])),
        Column("contexts p", lambda r: p_text(r["cluster"]) if shared else None),
        Column("Holm", lambda r: p_text(r["cluster_holm"]) if shared else None),
    )
    notes = [
        "difference: of the mean scores, with a 95% interval over contexts. only policy, only other: questions that "
        "one of the two answers.",
        "McNemar: exact, two-sided. sign: exact, one-sided, that the policy is the better one. Holm: over this table.",
    ]
    if shared:
        notes.append(
            "Questions share contexts, which McNemar's and the sign test do not know: trust contexts p, by exchanging "
            "whole contexts."
        )
    return Table("Tests between policies", columns, rows, notes)


def _rival(labels: dict[Variant, str], a: Variant, b: Variant) -> str:
    """The budget is said where it is another."""
    return title(b[0]) if a[1] == b[1] or not b[1] else labels[b]


def split(setting: Setting) -> Table | None:
    """Splits each router's lift over top-k into budget and selectivity."""
    labels = {f.variant: f.label for f in setting.findings}
    columns = (
        Column("policy", lambda r: labels[r.policy, r.budget], left=True),
        Column("lift over top-k", lambda r: estimate(r.parts.lift, sign=True)),
        Column("= budget", lambda r: estimate(r.parts.budget, sign=True)),
        Column("+ selectivity", lambda r: estimate(r.parts.selectivity, sign=True)),
        Column("control off by", "worst_mismatch", ".2%"),
    )
    notes = [
        "budget: what uniform top-k gains by keeping as much as the router; selectivity: what the router has beyond.",
        "control off by: how far the matched control's effective budget is from the router's on the worst example.",
    ]
    rows = setting.splits
    return Table("Where the lift comes from: budget or selectivity", columns, rows, notes) if rows else None


_WHO = (Column("policy", "spec.title", left=True), Column("budget (tile budget)", "budget_text", left=True))


def triggers(setting: Setting) -> Table | None:
    """How many tiles were triggered, and whether the one that mattered was."""
    rows = [f for f in setting.findings if f.triggers]
    columns = (
        *_WHO,
        Column("triggered", "line.trigger_rate", ".0%"),
        Column("lowest layer", lambda f: extreme(f, min), ".0%"),
        Column("highest layer", lambda f: extreme(f, max), ".0%"),
        Column("tile with the question", "line.asked_triggered", ".0%"),
        Column("last tile", lambda f: known_mean(f.by_layer["last_triggered"]), ".0%"),
    )
    notes = [
        "triggered: of the tiles with more visible blocks than the tile budget. tile with the question: in how many "
        "layers and questions it was triggered.",
        f"Controls: {'; '.join(f'/{name}, {what}' for name, what in CONTROLS.items())}.",
    ]
    return Table("Triggered tiles", columns, rows, notes) if rows else None


def extreme(finding: Finding, choose: Any) -> float | None:
    """The lowest (`min`) or highest (`max`) trigger rate of a layer."""
    return choose((x for x in finding.by_layer["trigger_rate"] if x is not None), default=None)  # type: ignore[no-any-return]


def hits(setting: Setting) -> Table | None:
    """Gold blocks kept, over layers and, for a chase, hop by hop."""
    rows = [f for f in setting.findings if f.line.hit is not None]
    hops = max((len(f.by_hop) for f in rows), default=0)
    columns = (
        *_WHO,
        Column("hit rate", "line.hit", ".2f"),
        Column("head union", "line.hit_union", ".2f"),
        *map(_hop, range(hops)),
    )
    notes = [
        "hit rate: of the gold blocks, kept by a head for the tile with the question; head union: by any of a layer's."
    ]
    if hops:
        notes.append("hop: the head union, entry by entry of the chain.")
    return Table("Gold blocks kept", columns, rows, notes) if rows else None


def _hop(k: int) -> Column:
    return Column(f"hop {k}", lambda f: f.by_hop[k] if k < len(f.by_hop) else None, ".2f")


def speed(setting: Setting) -> Table:
    columns = (
        *_WHO,
        Column("prefill s", "prefill_seconds", ".3f"),
        Column("vs dense", "prefill_vs_dense", ".2f"),
    )
    notes = [
        "Medians over examples; vs dense: of the ratios, example by example, of time as a part of dense's. Measured "
        "while selections were recorded: `closecall bench prefill` measures speed alone.",
    ]
    return Table("Time of the prefill", columns, setting.findings, notes)


def of(setting: Setting) -> list[Table]:
    """All tables that have something to say."""
    if not setting.findings:
        return []
    made = [policies, tests, split, triggers, hits, speed]
    return [table for make in made if (table := make(setting)) is not None]


def side_by_side(settings: Sequence[Setting]) -> Table:
    """One task and context, a column pair for each model, as in the paper's Table 2."""
    listed = [s for s in settings if s.findings]
    order = list(dict.fromkeys(f.variant for s in listed for f in s.findings))
    first = {v: next(f for s in listed for f in s.findings if f.variant == v) for v in order}
    rows: list[dict[str, Any]] = []
    for variant in order:
        by_model = {s.fingerprint: s.find(*variant) for s in listed}
        rows.append({"finding": first[variant], "by_model": by_model})
        if variant == DENSE:
            rows.append({"finding": None, "by_model": by_model})
    columns: list[Column] = [
        Column("policy", lambda r: "n_dc" if r["finding"] is None else r["finding"].spec.title, left=True),
        Column("scorer", "finding.scorer", left=True),
        Column("budget (tile budget)", "finding.budget_text", left=True),
    ]
    columns += [column for s in listed for column in _model_columns(s)]
    return Table(
        f"{where(listed[0])}: the models side by side", columns, rows, ["Intervals are in each model's own table."]
    )


def _model_columns(setting: Setting) -> list[Column]:
    return [
        Column(f"{setting.model}: accuracy", lambda r: _cell(r, setting, "accuracy")),
        Column("paired", lambda r: _cell(r, setting, "paired")),
    ]


def _cell(row: dict[str, Any], setting: Setting, what: str) -> str | None:
    finding: Finding | None = row["by_model"][setting.fingerprint]
    if finding is None:
        return NOTHING
    if row["finding"] is None:
        return str(finding.paired.n) if what == "paired" and finding.paired else None
    value: Estimate | None = getattr(finding, what)
    return None if value is None or math.isnan(value.value) else f"{value.value:.2f}"
