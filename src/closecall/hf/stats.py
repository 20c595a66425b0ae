"""What an attached model did: measured per layer, and recorded on request."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..certify.certificate import Certificate
from ..policy import Policy
from ..selection import Selection

_BINS = 4096
_STOPPED = json.dumps({"stopped": "the byte limit was reached: later calls are not recorded"}) + "\n"
_NO_ROOM = "tile scores of {size:,} bytes do not fit into the {left:,} that are left: record without scores=True"


@dataclass
class LayerStats:
    """Running sums over everything one layer computed."""

    calls: int = 0
    sparse_calls: int = 0
    longest: int = 0  # the most keys of a call that could have been sparse
    tiles: int = 0
    kept: int = 0
    visible: int = 0
    cut: int = 0  # (head, tile) cells in which something was left out, so that they have a margin
    triggered: int = 0
    rows: int = 0  # (row, head) pairs that certificates were asked for
    certified: int = 0
    select_seconds: float = 0.0
    attend_seconds: float = 0.0
    histogram: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))

    def add_call(self, candidate_keys: int, select_seconds: float, attend_seconds: float) -> None:
        """Counts a call; `candidate_keys` are its keys if it could have been sparse, else 0."""
        self.calls += 1
        self.longest = max(self.longest, candidate_keys)
        self.select_seconds += select_seconds
        self.attend_seconds += attend_seconds

    def add(self, selection: Selection) -> None:
        heads = selection.counts.shape[1]
        self.sparse_calls += 1
        self.tiles += int(selection.geometry.exists.sum()) * heads
        self.visible += int(selection.geometry.visible.sum()) * heads
        self.kept += int(selection.counts.sum())
        margins = selection.margin[~selection.margin.isnan()].float().cpu()
        self.cut += margins.numel()
        self.triggered += int(selection.triggered.sum())
        self.histogram += torch.histc(margins, bins=_BINS, min=0.0, max=1.0).to(torch.int64)

    def add_certificate(self, certificate: Certificate, eps: float) -> None:
        rows = int(certificate.real.sum()) * certificate.mass.shape[1]
        self.rows += rows
        self.certified += round(certificate.certified(eps) * rows) if rows else 0

    def merge(self, other: LayerStats) -> None:
        """Adds another layer's sums; calls are not added, since every layer sees the same ones."""
        self.calls = max(self.calls, other.calls)
        self.sparse_calls = max(self.sparse_calls, other.sparse_calls)
        self.longest = max(self.longest, other.longest)
        for name in ("tiles", "kept", "visible", "cut", "triggered", "rows", "certified"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.select_seconds += other.select_seconds
        self.attend_seconds += other.attend_seconds
        self.histogram += other.histogram

    def margin_quantile(self, q: float) -> float:
        """To 1/4096: margins are counted in bins, so that any length of run fits in the same memory."""
        if not self.cut:
            return float("nan")
        below = self.histogram.cumsum(0)
        return (int(torch.searchsorted(below, max(1, math.ceil(q * self.cut)))) + 0.5) / _BINS

    def summary(self, *, has_trigger: bool) -> dict[str, float | int]:
        """The figures of a layer; NaN for what there is none of: a share of nothing, a rate without a trigger."""
        nan = float("nan")
        return {
            "calls": self.calls,
            "sparse_calls": self.sparse_calls,
            "effective_budget": self.kept / self.tiles if self.tiles else nan,
            "kept_fraction": self.kept / self.visible if self.visible else nan,
            "trigger_rate": self.triggered / self.cut if self.cut and has_trigger else nan,
            "margin_p10": self.margin_quantile(0.1),
            "margin_p50": self.margin_quantile(0.5),
            "margin_p90": self.margin_quantile(0.9),
            "certified": self.certified / self.rows if self.rows else nan,
            "select_seconds": self.select_seconds,
            "attend_seconds": self.attend_seconds,
        }


class Stats(dict[int, dict[str, float | int]]):
    """The figures of every attached layer, by its number. As text it is a table for people, with a total."""

    def __init__(self, layers: dict[int, LayerStats], policy: Policy) -> None:
        has_trigger = policy.rule.has_trigger()
        super().__init__({index: stats.summary(has_trigger=has_trigger) for index, stats in layers.items()})
        self._layers = list(layers.values())
        self._policy = policy

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        return dict, (dict(self),)

    @property
    def total(self) -> dict[str, float | int]:
        """The figures of all layers together; calls are those of the layer that had most."""
        everything = LayerStats()
        for stats in self._layers:
            everything.merge(stats)
        return everything.summary(has_trigger=self._policy.rule.has_trigger())

    def __str__(self) -> str:
        columns = [column for column in COLUMNS if any(not math.isnan(row[column.key]) for row in self.values())]
        rows = [["layer", *(column.heading for column in columns)]]
        for name, figures in [*((str(index), figures) for index, figures in self.items()), ("all", self.total)]:
            rows.append([name, *(column.text(figures[column.key]) for column in columns)])
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([str(self._policy), *lines])


class Column(NamedTuple):
    """One figure as a table shows it."""

    key: str
    heading: str
    form: str

    def text(self, value: float) -> str:
        return "-" if math.isnan(value) else format(value, self.form)


COLUMNS = (
    Column("calls", "calls", "d"),
    Column("sparse_calls", "sparse", "d"),
    Column("effective_budget", "blocks a tile", ".1f"),
    Column("kept_fraction", "kept", ".1%"),
    Column("trigger_rate", "triggered", ".1%"),
    Column("certified", "certified", ".1%"),
    Column("select_seconds", "selection s", ".3f"),
    Column("attend_seconds", "attention s", ".3f"),
)


class Recorder:
    """Streams selections to a directory: one `.npz` per call (plain arrays, no pickle) and an index of JSON lines.

    Nothing is kept in memory, and recording stops at `max_bytes`; the index says so in its last line. Tile scores grow
    with tiles times blocks, 1 GiB a head at a million tokens: a call whose scores alone are more than is left is
    recorded without, and its line says so.
    """

    def __init__(self, directory: str | Path, *, scores: bool, max_bytes: int) -> None:
        if max_bytes < len(_STOPPED):
            raise ValueError(f"max_bytes must leave room for an index, got {max_bytes!r}")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if any(self.directory.iterdir()):
            raise FileExistsError(f"{self.directory} is not empty: record into a new directory")
        self.scores = scores
        self.left = max_bytes
        self.count = 0

    def write(self, layer: int, selection: Selection, scores: Callable[[], Tensor] | None = None) -> None:
        """Adds a call; `scores` makes its tile scores, if they are wanted and there is room for them."""
        if self.left <= 0:
            return
        tensors = {"kv_idx": selection.lists} | {n: getattr(selection, n) for n in ("counts", "margin", "triggered")}
        arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        geometry = selection.geometry
        arrays |= {name: getattr(geometry, name).cpu().numpy() for name in ("row", "rows", "key", "pos", "sequence")}
        size, note = 4 * selection.counts.numel() * geometry.n_blocks, {}
        if scores is not None and size > self.left:
            note = {"no_scores": _NO_ROOM.format(size=size, left=self.left)}
        elif scores is not None:
            arrays["tile_scores"] = scores().float().cpu().numpy()
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)
        name = f"{self.count:06d}-layer{layer:03d}.npz"
        line: dict[str, Any] = {"file": name, "layer": layer, "block": geometry.block, "tile": geometry.tile}
        line |= {"q_len": geometry.q_len, "k_len": geometry.k_len, "n_blocks": geometry.n_blocks}
        text = json.dumps(line | note) + "\n"
        size = packed.tell() + len(text)
        if size > self.left - len(_STOPPED):
            text, size = _STOPPED, self.left
        else:
            (self.directory / name).write_bytes(packed.getvalue())
        with (self.directory / "index.jsonl").open("a") as index:
            index.write(text)
        self.left -= size
        self.count += 1
