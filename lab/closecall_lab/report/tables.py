"""The tables of a report. Every one has its notes on how to read it; a budget never stands without its tile budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..eval.spec import CONTROLS
from ..eval.statistics import Comparison, Estimate
from ..eval.summary import Variant
from ..spine.numbers import size
from ..spine.table import NOTHING, Column, Table
from .gather import DENSE, Finding, Setting, rivals

P_VALUES = "exact McNemar, two-sided"
P_VALUES_SHARED = "by exchanging whole contexts, because questions share them"


def p_text(p: float) -> str:
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def estimate(value: Estimate | None, *, sign: bool = False) -> str | None:
    """0.75 [0.30, 0.95]; nothing where there was nothing to divide by."""
    if value is None or math.isnan(value.value):
        return None
    spec = "+.2f" if sign else ".2f"
    if math.isnan(value.low):
        return f"{value.value:{spec}}"
    return f"{value.value:{spec}} [{value.low:{spec}}, {value.high:{spec}}]"


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
    """The test of a finding against what `gather.rivals` calls by that name."""
    name = rivals(finding.spec).get(rival)
    if name is None:
        return None
    return setting.test(finding.variant, DENSE if name == "dense" else (name, finding.line.budget))


def where(setting: Setting) -> str:
    return f"{setting.task} at {size(setting.context)} tokens" if setting.context else setting.task


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def sample(setting: Setting) -> str:
    examples, questions = count(setting.examples, "example"), count(setting.questions, "question")
    return examples if setting.examples == setting.questions else f"{examples}, {questions}"


def policies(setting: Setting) -> Table:
    """Accuracy and paired recall in the paper's layout: a row for each policy."""
    columns = (
        Column("policy", lambda f: str(f["it"].spec), left=True),
        Column("scorer", lambda f: f["it"].scorer, left=True),
        Column("budget (tile budget)", lambda f: f["it"].budget_text, left=True),
        Column("effective budget", lambda f: f["it"].line.effective_budget, ".1f"),
        Column("kept", lambda f: f["it"].line.kept_fraction, ".0%"),
        Column("accuracy", lambda f: estimate(f["it"].accuracy)),
        Column("score", lambda f: estimate(f["it"].line.score) if setting.graded else None),
        Column("by logits", lambda f: estimate(f["it"].by_logits)),
        Column("no letter", lambda f: f["it"].line.no_letter, ".0%"),
        Column("n_dc", lambda f: f["it"].paired and f["it"].paired.n),
        Column("paired recall", lambda f: estimate(f["it"].paired)),
        Column("p vs dense", lambda f: _p(setting, f["it"], "dense")),
        Column("p vs topk", lambda f: _p(setting, f["it"], "topk")),
        Column("p vs matched", lambda f: _p(setting, f["it"], "matched")),
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
    return Table("Accuracy and paired recall", columns, _rows(setting.findings), notes, keys=3)


def _rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [{"it": f} for f in findings]


def tests(setting: Setting) -> Table | None:
    """Policy against policy, with what the p-values come from."""
    labels = {f.variant: f.label for f in setting.findings}
    rows = [vars(c) | {"policy": labels[a], "against": _rival(labels, a, b)} for a, b, c in setting.tests]
    if not rows:
        return None
    shared = setting.shared
    columns = (
        Column("policy", lambda r: r["policy"], left=True),
        Column("against", lambda r: r["against"], left=True),
        Column("difference", lambda r: estimate(r["difference"], sign=True)),
        Column("only policy", lambda r: r["wins"]),
        Column("only other", lambda r: r["losses"]),
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
    return b[0] if a[1] == b[1] or not b[1] else labels[b]


def split(setting: Setting) -> Table | None:
    """Where a router's lift comes from."""
    labels = {f.variant: f.label for f in setting.findings}
    columns = (
        Column("policy", lambda r: labels[r["policy"], r["budget"]], left=True),
        Column("lift over top-k", lambda r: estimate(r["parts"].lift, sign=True)),
        Column("= budget", lambda r: estimate(r["parts"].budget, sign=True)),
        Column("+ selectivity", lambda r: estimate(r["parts"].selectivity, sign=True)),
        Column("control off by", lambda r: r["worst_mismatch"], ".2%"),
    )
    notes = [
        "budget: what uniform top-k gains by keeping as much as the router; selectivity: what the router has beyond.",
        "control off by: how far the matched control's effective budget is from the router's on the worst example.",
    ]
    rows = [vars(s) for s in setting.splits]
    return Table("Where the lift comes from: budget or selectivity", columns, rows, notes) if rows else None


def triggers(setting: Setting) -> Table | None:
    """How many tiles were triggered, and whether the one that mattered was."""
    rows = _rows([f for f in setting.findings if f.triggers])
    columns = (
        Column("policy", lambda r: str(r["it"].spec), left=True),
        Column("budget (tile budget)", lambda r: r["it"].budget_text, left=True),
        Column("triggered", lambda r: r["it"].line.trigger_rate, ".0%"),
        Column("lowest layer", lambda r: extreme(r["it"], min), ".0%"),
        Column("highest layer", lambda r: extreme(r["it"], max), ".0%"),
        Column("tile with the question", lambda r: r["it"].line.asked_triggered, ".0%"),
        Column("last tile", lambda r: _over_layers(r["it"], "last_triggered"), ".0%"),
    )
    notes = [
        "triggered: of the tiles with more visible blocks than the tile budget. tile with the question: in how many "
        "layers and questions it was triggered.",
        f"Controls: {'; '.join(f'/{name}, {what}' for name, what in CONTROLS.items())}.",
    ]
    return Table("Triggered tiles", columns, rows, notes) if rows else None


def _numbers(finding: Finding, what: str) -> list[float]:
    return [x for x in finding.by_layer[what] if x is not None]


def extreme(finding: Finding, choose: Any) -> float | None:
    values = _numbers(finding, "trigger_rate")
    return choose(values) if values else None


def _over_layers(finding: Finding, what: str) -> float | None:
    values = _numbers(finding, what)
    return sum(values) / len(values) if values else None


def hits(setting: Setting) -> Table | None:
    """Gold blocks kept, over layers and, for a chase, hop by hop."""
    rows = _rows([f for f in setting.findings if f.line.hit is not None])
    hops = max((len(r["it"].by_hop) for r in rows), default=0)
    columns = (
        Column("policy", lambda r: str(r["it"].spec), left=True),
        Column("budget (tile budget)", lambda r: r["it"].budget_text, left=True),
        Column("hit rate", lambda r: r["it"].line.hit, ".2f"),
        Column("head union", lambda r: r["it"].line.hit_union, ".2f"),
        *map(_hop, range(hops)),
    )
    notes = [
        "hit rate: of the gold blocks, kept by a head for the tile with the question; head union: by any of a layer's."
    ]
    if hops:
        notes.append("hop: the head union, entry by entry of the chain.")
    return Table("Gold blocks kept", columns, rows, notes) if rows else None


def _hop(k: int) -> Column:
    return Column(f"hop {k}", lambda r: r["it"].by_hop[k] if k < len(r["it"].by_hop) else None, ".2f")


def speed(setting: Setting) -> Table:
    columns = (
        Column("policy", lambda r: str(r["it"].spec), left=True),
        Column("budget (tile budget)", lambda r: r["it"].budget_text, left=True),
        Column("prefill s", lambda r: r["it"].prefill_seconds, ".3f"),
        Column("vs dense", lambda r: r["it"].prefill_vs_dense, ".2f"),
    )
    notes = [
        "Medians over examples; vs dense: of the ratios, example by example, of time as a part of dense's. Measured "
        "while selections were recorded: `closecall bench prefill` measures speed alone.",
    ]
    return Table("Time of the prefill", columns, _rows(setting.findings), notes)


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
        found = {s.fingerprint: s.find(*variant) for s in listed}
        rows.append({"it": first[variant], "found": found})
        if variant == DENSE:
            rows.append({"it": None, "found": found})
    columns: list[Column] = [
        Column("policy", lambda r: "n_dc" if r["it"] is None else str(r["it"].spec), left=True),
        Column("scorer", lambda r: r["it"] and r["it"].scorer, left=True),
        Column("budget (tile budget)", lambda r: r["it"] and r["it"].budget_text, left=True),
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
    finding: Finding | None = row["found"][setting.fingerprint]
    if finding is None:
        return NOTHING
    if row["it"] is None:
        return str(finding.paired.n) if what == "paired" and finding.paired else None
    value: Estimate | None = getattr(finding, what)
    return None if value is None or math.isnan(value.value) else f"{value.value:.2f}"
