"""What an attached model did: measured per layer, and recorded on request."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..certify.certificate import Certificate
from ..selection import Selection

_BINS = 4096
_STOPPED = json.dumps({"stopped": "the byte limit was reached: later calls are not recorded"}) + "\n"


@dataclass
class LayerStats:
    """Running sums over everything one layer computed."""

    calls: int = 0
    sparse_calls: int = 0
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

    def add_certificate(self, found: Certificate, eps: float) -> None:
        rows = int(found.real.sum()) * found.mass.shape[1]
        self.rows += rows
        self.certified += round(found.certified(eps) * rows) if rows else 0

    def margin_quantile(self, q: float) -> float:
        """To 1/4096: margins are counted in bins, so that any length of run fits in the same memory."""
        if not self.cut:
            return float("nan")
        below = self.histogram.cumsum(0)
        return (int(torch.searchsorted(below, max(1, math.ceil(q * self.cut)))) + 0.5) / _BINS

    def summary(self) -> dict[str, float | int]:
        nan = float("nan")
        return {
            "calls": self.calls,
            "sparse_calls": self.sparse_calls,
            "effective_budget": self.kept / self.tiles if self.tiles else nan,
            "kept_fraction": self.kept / self.visible if self.visible else nan,
            "trigger_rate": self.triggered / self.cut if self.cut else nan,
            "margin_p10": self.margin_quantile(0.1),
            "margin_p50": self.margin_quantile(0.5),
            "margin_p90": self.margin_quantile(0.9),
            "certified": self.certified / self.rows if self.rows else nan,
            "select_seconds": self.select_seconds,
            "attend_seconds": self.attend_seconds,
        }


class Recorder:
    """Streams selections to a directory: one `.npz` per call (plain arrays, no pickle) and an index of JSON lines.

    Nothing is kept in memory, and recording stops at `max_bytes`; the index says so in its last line.
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

    def write(self, layer: int, selection: Selection, scores: Tensor | None) -> None:
        if self.left <= 0:
            return
        arrays = {name: getattr(selection, name).cpu().numpy() for name in ("kv_idx", "counts", "margin", "triggered")}
        geometry = selection.geometry
        arrays |= {name: getattr(geometry, name).cpu().numpy() for name in ("row", "rows", "key", "pos", "sequence")}
        if scores is not None:
            arrays["tile_scores"] = scores.float().cpu().numpy()
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)
        name = f"{self.count:06d}-layer{layer:03d}.npz"
        line: dict[str, Any] = {"file": name, "layer": layer, "block": geometry.block, "tile": geometry.tile}
        line |= {"q_len": geometry.q_len, "k_len": geometry.k_len, "n_blocks": geometry.n_blocks}
        text = json.dumps(line) + "\n"
        size = packed.tell() + len(text)
        if size > self.left - len(_STOPPED):
            text, size = _STOPPED, self.left
        else:
            (self.directory / name).write_bytes(packed.getvalue())
        with (self.directory / "index.jsonl").open("a") as index:
            index.write(text)
        self.left -= size
        self.count += 1
