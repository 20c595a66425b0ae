"""Cells made by hand, so that a dump's answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from closecall_lab.theory.cells import COLUMNS, Rows
from closecall_lab.theory.dump import Writer
from closecall_lab.theory.gaps import Tiles, floors, gaps

FACTS: dict[str, Any] = {
    "model": "made up", "label": "nothing", "task": "none", "context": 0, "n": 0, "seed": 0, "budget": 2, "q": 0.4,
    "tile_factor": 1, "rho": 2, "prefill": "dense", "scorers": ["made"], "tile_budget": 2, "expanded_budget": 4,
}  # fmt: skip


def rows(scores: torch.Tensor, tile: int, keep: int, expanded: int, **columns: Any) -> Rows:
    """The heads of one tile from ranked scores [H, blocks]; columns not given are 0, tau 1."""
    tiles = Tiles.of(scores, keep, expanded)
    g = gaps(tiles)
    found: dict[str, Any] = {name: 0 for name in COLUMNS if name not in ("example", "layer")}
    found |= {"head": torch.arange(len(scores)), "tile": tile, "keep": keep, "expanded": expanded, "tau": 1.0}
    for ending in ("", "_bf16"):
        found |= {f"{n}{ending}": getattr(g, n) for n in ("cutoff", "expansion", "spread", "margin")}
    found |= {"floor": floors(tiles), "spacing_p10": 0.25, "spacing_p50": 0.5} | columns
    whole = {
        name: torch.as_tensor(value)
        .expand(len(scores))
        .to(torch.int64 if COLUMNS[name][0] == "int32" else torch.float32)
        for name, value in found.items()
    }
    return Rows(whole, scores)


def dump(path: Path, made: list[tuple[int, int, Rows]], **facts: Any) -> Path:
    """`made`: (example, layer, rows)."""
    with Writer(path, FACTS | facts) as writer:
        for example, layer, cells in made:
            writer.add("made", example, layer, cells)
    return path
