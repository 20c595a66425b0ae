"""The table and the plot of the prefill benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from closecall.policy import Policy

from ..spine import inputs, plot
from ..spine.results import Facts
from ..spine.table import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measured = Sequence[tuple[Facts, Facts]]
COLOURS = ("#6b7280", "#047857", "#7c3aed", "#1d4ed8", "#c2410c", "#a16207")


def _theirs(cell: Facts) -> str:
    """What the unattached model's attention is called in a heading."""
    return "SDPA" if cell["unattached"] == "sdpa" else str(cell["unattached"])


def _columns(theirs: str) -> list[Column]:
    return [
        Column("context", lambda r: inputs.size(r["context"])),
        Column("type", lambda r: r["dtype"], left=True),
        Column("threads", lambda r: r["threads"]),
        Column("policy", lambda r: r["policy"], left=True),
        Column("wall s", lambda r: inputs.three_digits(r["seconds"])),
        Column("attention s", lambda r: inputs.three_digits(r["attention_seconds"])),
        Column("attention", lambda r: r["attention_share"], ".0%"),
        Column(f"/ {theirs}", lambda r: r.get("over_unattached"), ".2f"),
        Column(f"bound / {theirs}", lambda r: r.get("bound_over_unattached"), ".2f"),
        Column("/ bound", lambda r: r.get("over_bound"), ".2f"),
        Column("/ our dense", lambda r: r.get("over_dense"), ".2f"),
        Column("effective budget", lambda r: r.get("effective_budget"), ".1f"),
        Column("triggered", lambda r: r.get("trigger_rate"), ".0%"),
    ]


def _rows(measured: Measured) -> list[dict[str, Any]]:
    rows = []
    for cell, result in measured:
        rows.append(cell | result["unattached"] | {"policy": f"not attached: {_theirs(cell)}"})
        rows += [cell | row | {"policy": name} for name, row in result["ours"].items()]
    return rows


def _where(machine: Facts, cell: Facts) -> str:
    return (
        f"{machine['cpu']}, {cell['tier'] or 'no native code'}, "
        f"torch {machine['torch']}, transformers {cell['transformers']}"
    )


def table(machine: Facts, measured: Measured, policies: Sequence[Policy], warnings: Sequence[str]) -> Table:
    cell, _ = measured[0]
    theirs = _theirs(cell)
    rounds = [r["rounds"] for _, r in measured]
    notes = [
        *warnings,
        *map(str, policies),
        f"/ {theirs}, / our dense: wall over the wall of the model not attached, or attached with policy dense;"
        " below 1 we are faster.",
        f"bound: the {theirs} model's wall with its attention replaced by ours and the rest unchanged, which is what"
        " Amdahl's law allows. / bound: our wall over it.",
        f"attention: in full-attention layers. {theirs}: time inside the function transformers calls, by a timer around"
        " it; ours: selection + attention as handle.stats() tells. Whatever else attaching costs is in wall.",
        "A prefill is model(ids, use_cache=True, logits_to_keep=1), attached beforehand; ids are random, seed fixed.",
        f"Medians of at least {min(rounds)} interleaved rounds. effective budget: mean kept blocks of a tile.",
    ]
    return Table(f"Prefill of {cell['model']}: {_where(machine, cell)}", _columns(theirs), _rows(measured), notes)


def figures(machine: Facts, measured: Measured, policies: Sequence[Policy]) -> dict[str, Figure]:
    cell, _ = measured[0]
    rows = []
    for here, result in measured:
        row: dict[str, Any] = here | {"threads": inputs.threads(here["threads"])}
        for name, ours in result["ours"].items():
            row |= {name: ours["over_unattached"], f"{name} bound": ours["bound_over_unattached"]}
        rows.append(row)
    styles = [(p.name, COLOURS[i % len(COLOURS)], "os^Dvp"[i % 6]) for i, p in enumerate(policies)]
    series = [plot.Series(f"{name} bound", None, colour, "", dashed=True) for name, colour, _ in styles]
    series += [plot.Series(name, name, colour, marker) for name, colour, marker in styles]
    budgets = sorted({p.rule.tile_budget for p in policies if p.rule.tile_budget is not None})
    budget = f"tile budget {', '.join(map(str, budgets))}; " if budgets else ""
    figure = plot.walls(
        title=f"Prefill time, attached over not attached ({_theirs(cell)})",
        subtitle=f"{cell['model']}; {budget}dashed: what Amdahl's law allows\n{_where(machine, cell)}",
        rows=rows,
        series=series,
        panels=("dtype", "threads"),
    )
    return {"prefill": figure}
