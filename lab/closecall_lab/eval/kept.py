"""What the selections of a prefill kept: counted as they are made, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from closecall.geometry import plan
from closecall.policy import Policy
from closecall.selection import Selection

from ..tasks.example import Example
from .matched import Applied
from .store import Run
from .subject import Subject


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass
class Sums:
    """One layer's selection, counted."""

    kept: int
    visible: int
    tiles: int
    cut: int = 0
    triggered: int = 0
    last_triggered: float = 0.0
    asked_triggered: list[float] = field(default_factory=list)  # one for each question
    hits: list[list[list[float]]] = field(
        default_factory=list
    )  # question, gold span, block: share of heads that keep it


@dataclass(frozen=True)
class Asked:
    """A question: the row that asks it, and the blocks of each of its gold spans."""

    row: int
    gold: list[list[int]]


class Watch:
    """Counts selections as the attached model makes them."""

    def __init__(self, asked: Sequence[Asked], *, first: int = 0) -> None:
        self.asked = asked
        self.first = first  # the position of the first row: other than 0 where a prompt is continued
        self.layers: dict[int, Sums] = {}

    def see(self, layer: int, selection: Selection) -> None:
        geometry, heads = selection.geometry, selection.counts.shape[1]
        begins = geometry.k_len - geometry.q_len
        if not geometry.whole or geometry.batch != 1 or begins != self.first or layer in self.layers:
            raise ValueError(f"layer {layer} did not make one selection for the whole prompt: evaluate one by one")
        fired = selection.triggered[0].float().mean(0)  # [T]: share of heads, all or none for tile-wise triggers
        tiles = [(a.row - self.first) // geometry.tile for a in self.asked]
        self.layers[layer] = Sums(
            kept=int(selection.counts.sum()),
            visible=int(geometry.visible.sum()) * heads,
            tiles=geometry.n_tiles * heads,
            cut=int((~selection.margin.isnan()).sum()),
            triggered=int(selection.triggered.sum()),
            last_triggered=float(fired[-1]),
            asked_triggered=[float(fired[t]) for t in tiles],
            hits=[
                [_held(selection.kept_mask((0, slice(None), t)), span) for span in a.gold]
                for a, t in zip(self.asked, tiles, strict=True)
            ],
        )

    def sums(self, indices: Sequence[int], tokens: int, policy: Policy, heads: int = 1) -> list[Sums]:
        """Returns every layer's sums. A layer that made no selection left nothing out."""
        return [self.layers.get(i) or everything(tokens, policy, heads, self.asked, first=self.first) for i in indices]


def _held(kept: Tensor, blocks: list[int]) -> list[float]:
    """Returns, for each block, the share of heads whose kept blocks, bool `[H, n_blocks]`, have it."""
    return [float(x) for x in kept[:, blocks].float().mean(0)]


def everything(tokens: int, policy: Policy, heads: int, asked: Sequence[Asked], *, first: int = 0) -> Sums:
    """The sums of a layer that left nothing out, and so made no selection, for the rows from `first` on."""
    geometry = plan(1, tokens - first, tokens, policy.block, policy.tile)
    visible = int(geometry.visible.sum()) * heads
    return Sums(
        kept=visible,
        visible=visible,
        tiles=geometry.n_tiles * heads,
        asked_triggered=[0.0 for _ in asked],
        hits=[[[1.0 for _ in span] for span in a.gold] for a in asked],
    )


def by_layer(indices: list[int], layers: list[Sums]) -> dict[str, Any]:
    """Returns what is stored layer by layer, averaged over questions; None where there is nothing to divide by."""

    def gold(layer: Sums, read: Any) -> float | None:
        values = [read(x) for question in layer.hits for span in question for x in span]
        return round(mean(values), 4) if values else None

    def hop(layer: Sums, k: int) -> float:
        return round(mean([float(x > 0) for spans in layer.hits if len(spans) > k for x in spans[k]]), 4)

    hops = max((len(spans) for spans in layers[0].hits), default=0)
    columns: dict[str, Any] = {
        "layer": indices,
        "effective_budget": [round(s.kept / s.tiles, 4) for s in layers],
        "kept_fraction": [round(s.kept / s.visible, 6) for s in layers],
        "trigger_rate": [round(s.triggered / s.cut, 6) if s.cut else None for s in layers],
        "last_triggered": [round(s.last_triggered, 4) for s in layers],
        "asked_triggered": [round(mean(s.asked_triggered), 4) for s in layers],
        "hit": [gold(s, float) for s in layers],
        "hit_union": [gold(s, lambda x: float(x > 0)) for s in layers],
    }
    if hops > 1:
        columns["hop_union"] = [[hop(s, k) for s in layers] for k in range(hops)]
    return columns


@dataclass(frozen=True)
class Prefill:
    """One prefill under a policy: its time, what every layer kept, and what there is to remark."""

    seconds: float
    indices: list[int]  # of the layers
    layers: list[Sums]
    notes: list[str]

    def run(
        self, subject: Subject, example: Example, applied: Applied, answers: list[dict[str, Any]], tokens: int,
        wall: float,
    ) -> Run:  # fmt: skip
        """Makes the run that is stored: the answers of a prompt of so many tokens, and what was kept of it."""
        return Run(
            model=subject.fingerprint,
            example=example.digest(),
            policy=applied.to_json(),
            score=mean([a["score"] for a in answers]),
            correct=sum(a["correct"] for a in answers),
            questions=len(answers),
            effective_budget=mean([s.kept / s.tiles for s in self.layers]),
            kept_fraction=mean([s.kept / s.visible for s in self.layers]),
            prompt_tokens=tokens,
            wall=wall,
            answers=answers,
            layers={"prefill_seconds": round(self.seconds, 4)} | by_layer(self.indices, self.layers),
            warnings=self.notes,
        )
