"""Tables of profiles: walls against both baselines, where the time went, crossovers, and the paper's figures beside."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closecall.policy import Policy

from ...eval.spec import Spec
from ...report.paper import ATTENTION_SHARE, MODELS, PARETO, PARETO_WHERE
from ...spine.numbers import size, three_digits
from ...spine.results import Facts, Measured, Store
from ...spine.table import WIDTH, Column, Table
from .crossover import Crossover, crossover
from .parts import MEANINGS, PARTS, Lap, allowed, elsewhere, function, selection
from .policies import DENSE, UNATTACHED

Row = dict[str, Any]


@dataclass(frozen=True)
class Tables(Table):
    """A table with others below it."""

    more: Sequence[Table] = ()

    def text(self, width: int = WIDTH) -> str:
        return "\n\n".join([super().text(width), *(table.text(width) for table in self.more)])

    def markdown(self, level: int = 1) -> str:
        return "\n".join([super().markdown(level), *(table.markdown(level + 1) for table in self.more)])


def wall(lap: Lap) -> float:
    return sum(lap.values())


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _ratio(above: Sequence[Lap], below: Sequence[Lap], of: Callable[[Lap], float] = wall) -> float:
    return _median(of(a) / wall(b) for a, b in zip(above, below, strict=True))


def _bound(rest: Sequence[Lap], mine: Sequence[Lap]) -> list[float]:
    """Amdahl's law: only attention changes, and everything else takes as long as in the baseline's model."""
    return [elsewhere(r) + allowed(m) for r, m in zip(rest, mine, strict=True)]


def row(cell: Facts, result: Facts, name: str) -> Row:
    """Everything that follows from the laps of one contender and of the baselines it ran beside."""
    laps: dict[str, list[Lap]] = result["laps"]
    own, base, dense = laps[name], laps[UNATTACHED], laps[DENSE]
    facts: Row = cell | {"name": name, "seconds": _median(map(wall, own))}
    facts |= {part: _median(lap[part] for lap in own) for part in PARTS}
    facts |= {
        "selection_seconds": _median(map(selection, own)),
        "elsewhere_seconds": _median(map(elsewhere, own)),
        "attention_share": _ratio(own, own, function),
        "extra_mib": result["extra_mib"].get(name),
    }
    if name == UNATTACHED:
        return facts | {"floor": _ratio(base, base, elsewhere)}
    bound, dense_bound = _bound(base, own), _bound(dense, own)
    return facts | {
        "over_unattached": _ratio(own, base),
        "over_dense": _ratio(own, dense),
        "bound_over_unattached": _median(b / wall(x) for b, x in zip(bound, base, strict=True)),
        "bound_over_dense": _median(b / wall(x) for b, x in zip(dense_bound, dense, strict=True)),
        "over_bound": _median(wall(m) / b for m, b in zip(own, bound, strict=True)),
        **result["kept"].get(name, {}),
    }


def rows(measured: Measured) -> list[Row]:
    return [row(cell, result, name) for cell, result in measured for name in result["laps"]]


def theirs(cell: Facts) -> str:
    """What the unattached model's attention is called in a heading."""
    return "SDPA" if cell["unattached"] == "sdpa" else str(cell["unattached"])


def shown_name(found: Row) -> str:
    if found["name"] == UNATTACHED:
        return f"not attached: {theirs(found)}"
    name, at, budget = str(found["name"]).partition("@")
    return Spec.parse(name).title + at + budget


def _seconds(key: str) -> Callable[[Row], str | None]:
    return lambda r: three_digits(r[key]) if r.get(key) else None


KEYS = 4  # columns that name a row


def _where_columns() -> list[Column]:
    return [
        Column("context", lambda r: size(r["context"])),
        Column("type", "dtype", left=True),
        Column("threads"),
        Column("policy", shown_name, left=True),
    ]


def _columns(base: str) -> list[Column]:
    return [
        *_where_columns(),
        Column("wall s", _seconds("seconds")),
        Column("selection s", _seconds("selection_seconds")),
        Column("attention s", _seconds("attend")),
        Column("rest s", _seconds("elsewhere_seconds")),
        Column("attention's share", "attention_share", ".0%"),
        Column("if it were free", lambda r: r.get("floor"), ".2f"),
        Column(f"/ {base}", lambda r: r.get("over_unattached"), ".2f"),
        Column(f"bound / {base}", lambda r: r.get("bound_over_unattached"), ".2f"),
        Column("/ bound", lambda r: r.get("over_bound"), ".2f"),
        Column("/ our dense", lambda r: r.get("over_dense"), ".2f"),
        Column("bound / our dense", lambda r: r.get("bound_over_dense"), ".2f"),
        Column("effective budget", lambda r: r.get("effective_budget"), ".1f"),
        Column("triggered", lambda r: r.get("trigger_rate"), ".0%"),
        Column("extra MiB", lambda r: r.get("extra_mib"), ".0f"),
    ]


def _about(machine: Facts, cell: Facts) -> str:
    where = cell["device"] if cell["device"] != machine["cpu"] else machine["cpu"]
    return f"{where}, {cell['tier'] or 'no native code'}, torch {machine['torch']}, transformers {cell['transformers']}"


def title(machine: Facts, cell: Facts) -> str:
    layers = f" x {cell['layers']}" if cell["what"] == "shape" else ""
    return f"Prefill of {cell['label']}{layers}: {_about(machine, cell)}"


def policies(measured: Measured) -> list[str]:
    """Every policy in words, its tile budget among them."""
    listed = [Policy.from_json(made) for cell, _ in measured for _, _, made in cell["variants"]]
    return list(dict.fromkeys(map(str, listed)))


def walls(machine: Facts, measured: Measured, warnings: Sequence[str] = ()) -> Tables:
    cell, _ = measured[0]
    base = theirs(cell)
    rounds = sorted({r["rounds"] for _, r in measured})
    said = list(dict.fromkeys(line for _, result in measured for line in result["measured"]))
    notes = [
        *(f"Warning: {w}" for w in warnings),
        *said,
        *policies(measured),
        f"/ {base}, / our dense: wall over the wall of the model not attached, or attached with policy dense; below 1 "
        "we are faster.",
        f"attention's share: of the wall, all that happens in the attention function. if it were free: the {base} "
        "model's wall without it, over its wall: no attention can do better.",
        f"bound: Amdahl's law for the measured attention: the {base} model's (or our dense model's) time outside "
        "attention, plus our selection and attention. / bound: our wall over it.",
        "rest: everything outside the attention function. extra MiB: peak memory of what was measured, beyond what was "
        "there before.",
        f"Medians of {' or '.join(map(str, rounds))} interleaved rounds.",
    ]
    more = [parts(measured)]
    crossed = crossovers(measured)
    more += [_crossings(crossed, base)] if crossed else []
    beside = paper(measured)
    more += [beside] if beside is not None else []
    return Tables(title(machine, cell), _columns(base), rows(measured), notes, KEYS, more)


def parts(measured: Measured) -> Table:
    """Seconds by part, and selection's parts apart."""
    columns = [*_where_columns(), *(Column(f"{name} s", _seconds(name)) for name in PARTS)]
    notes = [f"{name}: {MEANINGS[name]}." for name in PARTS]
    notes.append("summaries: time of ranking for the last tile alone, which is measured apart and taken off ranking.")
    return Table("Where the time goes", columns, rows(measured), notes, KEYS)


def crossovers(measured: Measured) -> list[tuple[Facts, str, str, Crossover]]:
    """Finds the crossover of every policy and baseline, by type and threads, that has at least two contexts."""
    by_policy: dict[tuple[str, int, str, str], dict[int, list[float]]] = {}
    first: dict[tuple[str, int, str, str], Facts] = {}
    for cell, result in measured:
        for name, laps in result["laps"].items():
            for base in (UNATTACHED, DENSE):
                if name in (UNATTACHED, DENSE):
                    continue
                key = (cell["dtype"], cell["threads"], name, base)
                first.setdefault(key, cell)
                pairs = zip(laps, result["laps"][base], strict=True)
                by_policy.setdefault(key, {})[cell["context"]] = [wall(a) / wall(b) for a, b in pairs]
    return [(first[key], key[2], key[3], crossover(ratios)) for key, ratios in by_policy.items() if len(ratios) > 1]


def _crossings(found: Sequence[tuple[Facts, str, str, Crossover]], base: str) -> Table:
    listed: dict[tuple[str, int, str], Row] = {}
    for cell, name, against, at in found:
        here = listed.setdefault((cell["dtype"], cell["threads"], name), cell | {"name": name})
        here[against] = str(at)
    columns = [
        Column("type", "dtype", left=True),
        Column("threads"),
        Column("policy", shown_name, left=True),
        Column(f"overtakes {base} at", lambda r: r.get(UNATTACHED), left=True),
        Column("overtakes our dense at", lambda r: r.get(DENSE), left=True),
    ]
    notes = [
        "The context from which on the wall is shorter, by straight lines in log wall ratio over log context between "
        "measured contexts; in brackets 95%, bootstrap over rounds.",
    ]
    return Table("Crossover", columns, list(listed.values()), notes, keys=3)


def paper(measured: Measured) -> Table | None:
    """The paper's GPU figures beside ours; None for a model that it has none of."""
    cell, _ = measured[0]
    model = MODELS.get(cell["model"])
    if model not in PARETO or cell["what"] != "shape":
        return None
    winner, figures = PARETO[model]
    rows = []
    for cell, result in measured:
        by_name = {name: row(cell, result, name) for name in result["laps"]}
        there = figures.get(cell["context"])
        for name, r in by_name.items():
            if name in (UNATTACHED, DENSE) or there is None:
                continue
            rows.append(
                r
                | {
                    "paper_share": ATTENTION_SHARE[model].get(cell["context"]),
                    "share": by_name[UNATTACHED]["attention_share"],
                    "dense_share": by_name[DENSE]["attention_share"],
                    "paper_wall": there[1] if name.partition("@")[0] == winner else None,
                }
            )
    if not rows:
        return None
    columns = [
        *_where_columns(),
        Column("share, paper", "paper_share", ".0%"),
        Column("SDPA model", "share", ".0%"),
        Column("our dense model", "dense_share", ".0%"),
        Column("wall vs dense, paper", "paper_wall", ".2f"),
        Column("/ SDPA", "over_unattached", ".2f"),
        Column("/ our dense", "over_dense", ".2f"),
    ]
    notes = [
        f"share: attention's part of dense prefill. The paper's figures: {PARETO_WHERE}, on a GPU (its profiled router "
        "is on mean scores, its accuracy that of the winning scorer).",
    ]
    return Table("Beside the paper", columns, rows, notes, KEYS)


def document(paths: Sequence[Path]) -> str:
    """Markdown of what these files of results hold: one section for each machine and model."""
    groups: dict[str, tuple[Facts, Measured]] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such file: {path}. `closecall profile ... --out {path.parent}` makes one")
        for record in Store(path, remedy="name one that `closecall profile` made").records:
            cell, machine = record["cell"], record["machine"]
            if cell.get("what") not in ("model", "shape"):
                raise ValueError(
                    f"{path} holds results of another benchmark: name a file that `closecall profile` made"
                )
            alike = [cell["what"], cell["model"], cell["label"], machine, cell["device"], cell["tier"]]
            alike.append(record["result"]["measured"][0])  # a whole layer is not mixed with a part of one
            groups.setdefault(repr(alike), (machine, []))[1].append((cell, record["result"]))
    if not groups:
        raise ValueError(f"nothing is in {', '.join(map(str, paths))} yet: run `closecall profile` first")
    pages = []
    for machine, measured in groups.values():
        measured.sort(key=lambda pair: (pair[0]["context"], pair[0]["threads"], pair[0]["dtype"]))
        pages.append(walls(machine, measured).markdown(2))  # to stand under a page's own title
    return "\n".join(pages)
