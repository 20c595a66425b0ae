"""What cheaper scores would cost: `python -m research.cheaper_products CAPTURE` prints one table.

A capture (`closecall compare capture`) holds queries, keys and values of real prompts. A policy selects on them as it
is, and then with scores made more cheaply: summaries and rows in fewer bits, keys and rows in fewer directions, or
only blocks that a neighbouring tile, an earlier layer, or a few rows of the tile liked. All keep the same number of
blocks, and attention itself is exact. Directions are fitted on the first prompt, which is not judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import closecall
from closecall.backends import reference
from closecall.geometry import Geometry
from closecall.policy import Policy, parse
from closecall.scorers.base import Scorer
from closecall.selection import Selection
from closecall_lab.eval.compare.capture import Capture, CapturedLayer
from closecall_lab.eval.compare.quality import Quality, dense_of, judge_kept, share
from closecall_lab.spine.table import Column, Table

TileScores = Callable[..., Tensor]
Found = dict[str, list[tuple[float, float, Quality]]]  # (products, recall, quality) of each layer
exact = reference.tile_scores


def int8(x: Tensor) -> Tensor:
    """Each vector rounded to 8 bits and a scale of its own."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


@closecall.SCORERS.register("rounded")
@dataclasses.dataclass(frozen=True)
class Rounded(Scorer):
    """A scorer whose summaries, and the rows that meet them, are rounded."""

    inner: Scorer
    rounding: Callable[[Tensor], Tensor]

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        return tuple(self.rounding(s) for s in self.inner.summarise(keys, block))

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        return self.inner.row_scores(self.rounding(rows), summary)


def rounded(rounding: Callable[[Tensor], Tensor]) -> TileScores:
    def scores(q: Tensor, k: Tensor, policy: Policy, *rest: Any) -> Tensor:
        assert policy.scorer is not None
        return exact(q, k, policy.replace(scorer=Rounded(policy.scorer, rounding)), *rest)

    return scores


def projected(directions: Tensor) -> TileScores:
    """Scores in some directions of each key head, `[Hkv, D, n]`."""

    def scores(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return exact(q @ directions.repeat_interleave(group, 0), k @ directions, *rest)

    return scores


def among(candidates: Callable[[Tensor], Tensor]) -> TileScores:
    """Exact scores of candidate blocks alone; `candidates` makes bool `[1, H, T, n_blocks]` of all scores."""

    def scores(q: Tensor, k: Tensor, policy: Policy, *rest: Any) -> Tensor:
        found = exact(q, k, policy, *rest)
        may = candidates(found)
        may[:, :, -1] = True  # the last tile, which asks, looks everywhere
        return found.where(may, -torch.inf)

    return scores


def liked(scores: Tensor, n: int) -> Tensor:
    """bool: each tile's n best blocks."""
    best = scores.topk(min(n, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def from_anchors(step: int, n: int) -> TileScores:
    """Every `step`-th tile looks everywhere; those between at its n best blocks, and at what has come since."""

    def candidates(scores: Tensor) -> Tensor:
        tile, block = torch.arange(scores.shape[2]), torch.arange(scores.shape[3])
        anchor = tile // step * step
        since = block >= anchor[:, None]  # blocks and tiles are of one size here
        return liked(scores, n)[:, :, anchor] | since | (tile == anchor)[:, None]

    return among(candidates)


def again(outlying: int, n: int) -> TileScores:
    """The n best blocks by a tile's mean and its outlying rows are scored by every row, and no others."""

    def scores(q: Tensor, k: Tensor, policy: Policy, geometry: Geometry, *rest: Any) -> Tensor:
        found = exact(q, k, policy, geometry, *rest)
        forced = geometry.forced_mask(policy.sinks)[:, None]
        rough = exact(q, k, policy.replace(pool=policy.tile, outlying=outlying, unpooled=0), geometry, *rest)
        may = forced | liked(rough.masked_fill(forced, -torch.inf), n)
        may[:, :, -1] = True
        return found.where(may, -torch.inf)

    return scores


def principal(layer: CapturedLayer, n: int) -> Tensor:
    """The n directions in which a head's keys are largest, `[Hkv, D, n]`."""
    found: Tensor = torch.linalg.eigh(layer.k[0].mT @ layer.k[0]).eigenvectors
    return found[..., -n:]


def selected(layer: CapturedLayer, policy: Policy, scores: TileScores) -> Selection:
    with mock.patch.object(reference, "tile_scores", scores):
        return closecall.select(layer.q, layer.k, policy, scale=layer.scale, backend="reference")


def recall(found: Selection, wanted: Selection) -> float:
    """The share of the wanted blocks that were found, where a tile can choose."""
    a, b = (x.kept_mask() for x in (found, wanted))
    choice = torch.tensor([wanted.counts[0, 0, t] < wanted.geometry.visible[0, t] for t in range(a.shape[2])])
    return float((a & b)[:, :, choice].sum() / b[:, :, choice].sum())


def ways(first: CapturedLayer, before: Tensor, width: int, tile: int) -> Iterator[tuple[str, float, TileScores]]:
    """(name, its products over the policy's own, how scores are made)."""
    dim = first.k.shape[3]
    yield "as it is", 1, exact
    yield "summaries and rows in bf16", 1, rounded(lambda x: x.bfloat16().float())
    yield "summaries and rows in int8", 1, rounded(int8)
    for part in (2, 4):
        yield f"{dim // part} of {dim} directions of the keys", 1 / part, projected(principal(first, dim // part))
    for step, times in ((4, 2), (4, 4), (8, 2), (8, 4), (16, 4)):
        name = f"one tile in {step} looks everywhere, the others at its {times * width} best blocks"
        yield name, 1 / step, from_anchors(step, times * width)
    for outlying, times in ((0, 4), (1, 4), (4, 2), (4, 4)):
        name = f"the {times * width} best by one mean and {outlying} outlying rows"
        yield name, (1 + outlying) / tile, again(outlying, times * width)
    share_of = float(before[0, 0].sum() / sum(range(before.shape[2] + 1)))
    yield "blocks that any head of the layer before kept", share_of, among(lambda _: before.clone())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capture")
    parser.add_argument("--policy", default="auto:budget=4")
    parser.add_argument("--prompts", type=int, default=2, help="judged, besides the first (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="as many as these, evenly spread (%(default)s)")
    args = parser.parse_args()
    policy = parse(args.policy)
    prompts = Capture.open(args.capture).prompts()
    step = max(1, (len(prompts) - 1) // args.prompts)
    layers = prompts[0].layers[:: max(1, len(prompts[0].layers) // args.layers)][: args.layers]
    results: Found = {}
    for prompt in prompts[1::step][: args.prompts]:
        before = None
        for index in layers:
            layer, first = prompt.load(index), prompts[0].load(index)
            plain = selected(layer, policy, exact)
            if before is not None:  # the first layer serves the second as the one before
                dense = dense_of(layer)
                for name, cost, scores in ways(first, before, policy.rule.tile_budget or 8, policy.tile):
                    kept = plain if scores is exact else selected(layer, policy, scores)
                    result = cost, recall(kept, plain), judge_kept(layer, kept, prompt.asked, dense)
                    results.setdefault(name, []).append(result)
            before = plain.kept_mask().any(1, keepdim=True).expand(-1, layer.q.shape[1], -1, -1)
    print(shown(f"{args.capture}: {policy}; {len(layers) - 1} layers of {args.prompts} prompts", results).text())


def shown(title: str, found: Found) -> Table:
    rows: list[dict[str, Any]] = []
    for name, results in found.items():  # sums of gold mass, as most heads look elsewhere
        costs, recalls, qualities = zip(*results, strict=True)
        kept, there = (sum(getattr(q, part) or 0.0 for q in qualities) for part in ("gold_kept", "gold_there"))
        means = {what: statistics.fmean(getattr(q, what) for q in qualities) for what in ("error", "effective_budget")}
        more = {"name": name, "gold": share(kept, there)}
        rows.append({"recall": statistics.fmean(recalls), "cost": statistics.fmean(costs), **means, **more})
    columns = [
        Column("scores", lambda r: r["name"], left=True),
        Column("products, long prompts", lambda r: r["cost"], ".2f"),
        Column("recall of the policy's blocks", lambda r: r["recall"], ".3f"),
        Column("error", lambda r: r["error"], ".4f"),
        Column("gold mass kept", lambda r: r["gold"], ".3f"),
        Column("blocks a tile", lambda r: r["effective_budget"], ".1f"),
    ]
    return Table(title, columns, rows)


if __name__ == "__main__":
    main()
