"""`closecall profile --shape`: one layer of a model's true dimensions, at the true context, times the layers it has.

Where a whole layer would take too long, a part is measured and multiplied: attention on some of the heads, which are
independent of each other, and everything else on some of the rows, in which it is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from closecall.models.entry import Shape

from ...spine.results import Facts, Measured
from ...spine.table import Table
from ..base import label
from . import figures, layer, tables
from .parts import PARTS, Lap
from .policies import DENSE, UNATTACHED
from .prefills import Prefills, Profile
from .shapes import LayerPart, check_room

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REST, LINEAR = "the rest of a layer", "a linear layer"  # contenders that are no prefills of their own


@dataclass(frozen=True)
class Factors:
    """What a contender's measured parts are multiplied by, within a layer and over layers."""

    query: float  # query heads of the layer over those measured
    key: float  # key heads likewise
    rows: float  # context over rows
    full: int
    linear: int

    def scaled(self, attention: Lap, rest: float, linear: float) -> Lap:
        """The lap of the whole model: `rest` and `linear` are seconds of one layer on the measured rows."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for name in PARTS[: PARTS.index("rest")]:
            seconds[name] = attention[name] * (self.key if name == "summaries" else self.query) * self.full
        seconds["rest"] = rest * self.rows * self.full
        seconds["linear layers"] = linear * self.rows * self.linear
        return seconds


@dataclass(frozen=True, kw_only=True)
class ShapeProfile(Profile):
    """Baselines, policies, and the rest of a layer take turns in a cell."""

    shape: Shape
    dtypes: tuple[str, ...]
    part: Callable[[int], LayerPart]  # what is measured, by context

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            for context in self.contexts:
                check_room(self.shape, context, dtype, self.part(context), self.device)

    def cells(self) -> list[Facts]:
        shared = self.shared() | {
            "what": "shape",
            "model": self.shape.name,
            "label": f"one layer of {self.shape.name}'s dimensions, random weights",
            "layers": self.shape.layers,
            "full_layers": self.shape.full_layers,
            "unattached": "sdpa",
        }
        return [
            {"context": n, "dtype": dtype, "threads": t, "part": vars(self.part(n)), **shared}
            for n in sorted(self.contexts)
            for t in self.threads
            for dtype in self.dtypes
        ]

    def label(self, cell: Facts) -> str:
        return f"{self.shape.name} {label(cell)}"

    def guess(self, cell: Facts) -> float:
        part = LayerPart(**cell["part"])
        speed = 80e9 * cell["threads"]
        head = 2 * cell["context"] ** 2 * self.shape.head_dim / speed
        sparse = (len(self.policies) - 1) * part.q_heads * min(1.0, 12e3 / cell["context"])
        rest = 2 * self.shape.weights / self.shape.layers * part.rows / speed
        alone = 1 + len(self.policies) if part.whole(self.shape, cell["context"]) else 1
        return float(self.rounds * (head * (2 * part.dense_heads + sparse) + rest * alone))

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        part, context = LayerPart(**cell["part"]), cell["context"]
        run = _whole_layer if part.whole(self.shape, context) else _parts_of_a_layer
        return run(self, part, context, cell["dtype"])

    def table(self, machine: Facts, measured: Measured) -> Table:
        return tables.walls(machine, measured, self.warnings)

    def figures(self, machine: Facts, measured: Measured) -> dict[str, Figure]:
        return figures.both(self.name, machine, measured)


def _add_other_layer(prefills: Prefills, bench: ShapeProfile, rows: int, dtype: str) -> None:
    """Adds one of a hybrid's layers without full attention."""
    if bench.shape.full_layers < bench.shape.layers:
        model = layer.linear(bench.shape, rows, dtype, bench.device.place)
        prefills.add(model, layer.prefill(model, layer.embeddings(model, rows)), LINEAR)


def _whole_layer(bench: ShapeProfile, part: LayerPart, context: int, dtype: str) -> Facts:
    model = layer.whole(bench.shape, context, dtype, bench.device.place)
    prefills = Prefills(bench.device)
    _add_other_layer(prefills, bench, context, dtype)
    return _measure(bench, part, context, dict.fromkeys(_names(bench), model), prefills)


def _parts_of_a_layer(bench: ShapeProfile, part: LayerPart, context: int, dtype: str) -> Facts:
    place, prefills = bench.device.place, Prefills(bench.device)
    model = layer.whole(bench.shape, part.rows, dtype, place)
    prefills.add(model, layer.prefill(model, layer.embeddings(model, part.rows)), REST)
    _add_other_layer(prefills, bench, part.rows, dtype)
    grouped = layer.attention_only(bench.shape, part.q_heads, part.kv_heads, context, dtype, place)
    models = dict.fromkeys(_names(bench), grouped)
    if part.dense_heads != part.q_heads:
        alone = layer.attention_only(bench.shape, part.dense_heads, 1, context, dtype, place)
        models |= dict.fromkeys((UNATTACHED, DENSE), alone)
    return _measure(bench, part, context, models, prefills)


def _names(bench: ShapeProfile) -> list[str]:
    return [UNATTACHED, *(p.name for p in bench.policies)]


def _measure(bench: ShapeProfile, part: LayerPart, context: int, models: dict[str, Any], prefills: Prefills) -> Facts:
    """`prefills` has the parts of a layer that are measured apart; the contenders join them here."""
    calls = {id(m): layer.prefill(m, layer.embeddings(m, context)) for m in models.values()}
    prefills.add(models[UNATTACHED], calls[id(models[UNATTACHED])])
    for profiled in bench.policies:
        model = models[profiled.name]
        prefills.add_attached(model, calls[id(model)], profiled)
    result = prefills.measure(bench.rounds, describe(bench.shape, part, context))
    factors = {name: factors_of(bench.shape, part, context, name) for name in models}
    return result | {
        "laps": multiply(result["laps"], factors),
        "as_measured": result["laps"],
        "factors": {name: vars(by) for name, by in factors.items()},
    }


def factors_of(shape: Shape, part: LayerPart, context: int, name: str) -> Factors:
    dense = name in (UNATTACHED, DENSE)
    query = shape.q_heads / (part.dense_heads if dense else part.q_heads)
    key = shape.kv_heads / (part.kv_heads if not dense or part.dense_heads == part.q_heads else 1)
    return Factors(query, key, context / part.rows, shape.full_layers, shape.layers - shape.full_layers)


def multiply(laps: dict[str, list[Lap]], factors: dict[str, Factors]) -> dict[str, list[Lap]]:
    """Laps of the whole model, round by round: what a contender did in attention, with the rest of that round."""
    whole: dict[str, list[Lap]] = {}
    for name, by in factors.items():
        rests = [lap["rest"] for lap in laps.get(REST, laps[name])]
        linears = [lap["rest"] for lap in laps[LINEAR]] if LINEAR in laps else [0.0] * len(rests)
        whole[name] = [by.scaled(*lap) for lap in zip(laps[name], rests, linears, strict=True)]
    return whole


def describe(shape: Shape, part: LayerPart, context: int) -> list[str]:
    """Exactly what was measured and what was multiplied, in sentences."""
    lines = []
    if part.whole(shape, context):
        lines.append("Measured: one whole layer, all heads and all rows, in one piece.")
    else:
        heads = f"{part.q_heads} of {shape.q_heads} query heads on {part.kv_heads} of {shape.kv_heads} key heads"
        times = f"times {shape.q_heads / part.q_heads:g}"
        if part.q_heads / part.kv_heads != shape.q_heads / shape.kv_heads:
            times += f" (summaries of keys times {shape.kv_heads / part.kv_heads:g})"
        who = "attention and selection" if part.dense_heads == part.q_heads else "attention and selection of policies"
        lines.append(f"Measured: {who}, on {heads} at the full context; {times}.")
        if part.dense_heads != part.q_heads:
            times = f"times {shape.q_heads / part.dense_heads:g}"
            lines.append(
                f"Measured: attention of SDPA and of our dense kernel, on {part.dense_heads} of {shape.q_heads} "
                f"query heads on one key head at the full context; {times}."
            )
        lines.append(
            f"Measured: everything outside attention, of one layer of true width, on {part.rows:,} rows; times "
            "context / rows. It is the same for all, so a wall over its bound shows only what our function does around "
            "selection and attention."
        )
    others = shape.layers - shape.full_layers
    if others:
        lines.append(
            f"Then times the layers: {shape.full_layers} of full attention, and {others} linear ones, of which one "
            f"was measured on {part.rows:,} rows."
        )
    else:
        lines.append(f"Then times {shape.layers} layers.")
    if shape.mixed and part.rows < context:
        lines.append(
            "With fewer rows each expert sees fewer of them, so the rest of a layer of experts is an upper bound."
        )
    return [*lines, "Left out: embedding, and the product with the vocabulary."]
