"""The tables of a validation: what was checked, and what was timed in the paper's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...spine import numbers
from ...spine.results import Facts
from ...spine.table import Column, Table
from . import rivals, speed, spot

Measured = Sequence[tuple[Facts, Facts]]
NAMES = {
    rivals.SDPA: "dense (SDPA)",
    rivals.FLASH: "dense (SDPA, flash)",
    rivals.CUDNN: "dense (SDPA, cuDNN)",
    rivals.EFFICIENT: "dense (SDPA, memory-efficient, keys repeated beforehand)",
    rivals.FA3: "dense (FlashAttention 3)",
    rivals.FLEX: "dense (FlexAttention)",
    speed.OURS: "dense (ours)",
    speed.FLEX: f"FlexAttention ({speed.FLEX_POLICY}'s blocks)",
}
# What the paper reports for Qwen2.5-7B-1M on an A100: attention's share of dense prefill, router's wall against dense.
PAPER = (
    "The paper, Qwen2.5-7B-1M on an A100 at 32K, 64K, 128K: share of dense 31%, 45%, 63%; vs dense 1.09x, 0.87x, 0.62x."
)


def done(result: Facts) -> bool:
    """Whether it was tried to its end, and right; or left out for a reason."""
    return not (result.get("problem") or result.get("no_memory"))


def verdict(result: Facts) -> str:
    if result.get("problem"):
        return "FAIL"
    if result.get("no_memory"):
        return "no memory"
    return "skipped" if result.get("skipped") else "pass"


def why(result: Facts) -> str | None:
    """What there is to say of a result that did not pass."""
    said: str | None = result.get("problem") or result.get("no_memory") or result.get("skipped")
    return said


def _used(row: Facts, *path: str) -> float | None:
    """How much of its bound the worst element used."""
    at: Any = row
    for key in path:
        at = at.get(key) or {}
    used: float | None = at.get("used")
    return used


def _worst(row: Facts, what: str) -> float | None:
    found = [u for name in ("attend", "attention") if (u := _used(row, name, what)) is not None]
    return max(found, default=None)


def _selection(row: Facts) -> str | None:
    facts = row.get("selection")
    if not facts:
        return None
    if facts["exact"]:
        return "identical"
    return (
        "same blocks" if not facts["other_tiles"] else f"{facts['other_tiles']} of {facts['tiles']} tiles by rounding"
    )


CHECKED = (
    Column("case", lambda r: r["case"], left=True),
    Column("verdict", verdict, left=True),
    Column("selection", _selection, left=True),
    Column("margin", lambda r: _used(r, "selection", "margin"), ".3f"),
    Column("output", lambda r: _worst(r, "out"), ".3f"),
    Column("LSE", lambda r: _worst(r, "lse"), ".3f"),
    Column("what", why, left=True),
)

TIMED = (
    Column("context", lambda r: numbers.size(r["context"])),
    Column("keys", lambda r: r["inputs"], left=True),
    Column("policy", lambda r: NAMES.get(r["name"], r["name"]), left=True),
    Column("attention ms", lambda r: numbers.three_digits(r["ms"])),
    Column("from a graph ms", lambda r: None if r["graph_ms"] is None else numbers.three_digits(r["graph_ms"])),
    Column("of it selection", lambda r: r["select_share"], ".1%"),
    Column("attention vs dense", lambda r: r["over_dense"], ".2f"),
    Column("vs our dense", lambda r: r["over_our_dense"], ".2f"),
    Column("share", lambda r: r["share"], ".0%"),
    Column("wall vs dense", lambda r: r["wall"], ".2f"),
    Column("kept", lambda r: r.get("kept"), ".1%"),
    Column("effective budget", lambda r: r.get("effective_budget"), ".1f"),
    Column("together", lambda r: r.get("together"), ".0%"),
    Column("extra MiB", lambda r: r["extra_mib"], ".1f"),
    Column("worst cell", lambda r: _used(r, "spots"), ".3f"),
)

KERNELS = (
    Column("kernel", lambda r: r["kernel"], left=True),
    Column("first seen in", lambda r: r["by"], left=True),
    Column("warps", lambda r: r["num_warps"]),
    Column("stages", lambda r: r["num_stages"]),
    Column("registers", lambda r: r["registers"]),
    Column("spills", lambda r: r["spills"]),
    Column("shared KiB", lambda r: r["shared_bytes"] / 1024, ".1f"),
    Column("sizes", lambda r: " ".join(f"{name}={value}" for name, value in r["sizes"].items()), left=True),
)


def environment(machine: Facts) -> list[str]:
    """The machine, a fact a line."""
    return [f"{name.replace('_', ' ')}: {value}" for name, value in machine.items() if value is not None]


def checks(measured: Measured, backend: str) -> Table:
    rows = [{"case": cell["case"]} | result for cell, result in measured]
    verdicts = [verdict(result) for _, result in measured]
    kinds = ("pass", "FAIL", "no memory", "skipped")
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in kinds if v in verdicts)
    notes = [
        "margin, output, LSE: how much of its bound the worst element used; above 1 is wrong. The bounds follow from "
        "float64, the data and the number of operations.",
        "identical: equal to the reference block for block, margin for margin. same blocks: as the reference keeps. "
        "by rounding: other blocks, whose scores differ by less than rounding can make of them.",
    ]
    return Table(f"Correctness of backend {backend}: {counted}", CHECKED, rows, notes)


def times(machine: Facts, measured: Measured, settings: speed.Speed, backend: str) -> Table:
    rows = [cell | row for cell, result in measured for row in result.get("rows", [])]
    rounds = min((result["rounds"] for _, result in measured if "rounds" in result), default=0)
    places = [(f"{numbers.size(cell['context'])} {cell['inputs']}", result) for cell, result in measured]
    best = ", ".join(f"{at} {NAMES.get(r['best_dense'])}" for at, r in places if "best_dense" in r)
    missing = {f"{NAMES.get(n, n)}: {why}": None for _, r in places for n, why in r.get("missing", {}).items()}
    no_graph = {f"{NAMES.get(n, n)}: {why}": None for _, r in places for n, why in r.get("no_graph", {}).items()}
    failed = [f"{at}: {why(result)}" for at, result in places if not done(result)]
    hardware = [f"{at}: {_hardware(r['hardware'])}" for at, r in places if r.get("hardware")]
    clock = "by events on the device's stream" if machine.get("capability") else "by the monotonic clock"
    rest = ", ".join(
        f"{at} {numbers.three_digits(result['rest_ms'])} ms" for at, result in places if "rest_ms" in result
    )
    notes = [
        *map(str, settings.policies),
        f"worst cell: of {spot.CELLS} (head, tile) cells of the timed output, how much of its float64 bound it used.",
        "Below 1 is faster than dense. vs dense: against the fastest dense attention of others here; vs our dense: "
        "against our own kernel run dense.",
        "share: attention's part of one decoder layer; wall vs dense: the layer's time against that with this dense.",
        "together: of the kept blocks, those whose neighbour is kept too. Keys: standard normal, or in clusters.",
        f"The rest of the layer (projections and a gated MLP, hidden size {settings.heads * settings.dim}, "
        f"intermediate {settings.intermediate}) took {rest or 'nothing'}.",
        f"Medians of at least {rounds} interleaved rounds {clock}, one sequence.",
        *([f"The fastest dense attention of others: {best}."] if best else []),
        *(f"Not timed: {problem}" for problem in missing),
        *(f"Not captured in a graph: {problem}" for problem in no_graph),
        *(f"Under load at {line}" for line in hardware),
        *(f"Failed at {problem}" for problem in failed),
        PAPER,
    ]
    title = (
        f"Attention of {machine['device']}, backend {backend}: {settings.dtype}, D = {settings.dim}, "
        f"{settings.heads} query heads on {settings.kv_heads}"
    )
    return Table(title, TIMED, rows, notes, keys=3)


def _hardware(facts: Facts) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if value is not None)


def kernels(measured: Measured) -> Table:
    """What our kernels were launched with, each once."""
    rows: dict[str, Facts] = {}
    for _, result in measured:
        for row in result.get("rows", []):
            for kernel in row.get("kernels", []):
                rows.setdefault(str({k: v for k, v in kernel.items() if k != "launches"}), kernel | {"by": row["name"]})
    return Table(
        "Launches", KERNELS, list(rows.values()), ["registers per thread; spills in bytes; as the driver says."]
    )


def page(machine: Facts, said: Sequence[str], tables: Sequence[Table]) -> str:
    """One Markdown page of all, the verdict first."""
    facts = "\n".join(f"- {line}" for line in environment(machine))
    words = "\n".join(said)
    return "\n".join([f"# closecall validate\n\n{words}\n\n{facts}\n", *(f"#{t.markdown()}" for t in tables)])
