"""Error curves: how wrong a head's output is when its tiles keep 1, 2, ... of their best blocks.

One pass over a prefill gives the whole curve of every head exactly, on a sample of rows: a block adds a known amount
to the numerator and the denominator of each row's softmax average, so cumulative sums in ranking order are the outputs
at every budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from closecall import Policy, backends
from closecall.geometry import Geometry, plan
from closecall.rules.last_tile import DENSE, LastTile
from closecall.rules.topk import TopK

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sample:
    """Which rows a curve is measured on: some tiles, evenly spaced and the last one among them, a few rows of each."""

    tiles: int = 12
    rows: int = 8

    def of(
        self, geometry: Geometry, sinks: int, wanted: Sequence[int] = (), *, last: bool = True
    ) -> list[tuple[int, Tensor]]:
        """(tile, its row numbers in the call), of the tiles that have more blocks than are forced.

        wanted: rows to take besides. last: whether the last tile is among them.
        """
        choosing = geometry.visible[0] > geometry.forced(sinks)[0] + 1
        choosing[-1] &= last
        tiles = choosing.nonzero()[:, 0]
        if not len(tiles):
            raise ValueError(f"no tile of {geometry.k_len} keys has a choice: tune on a longer text")
        picked = tiles[torch.linspace(0, len(tiles) - 1, min(self.tiles, len(tiles))).round().long()]
        rows = torch.cat([torch.tensor(wanted, dtype=torch.long), *(self._rows(geometry, int(t)) for t in picked)])
        taken = [(int(t), torch.unique(rows[rows // geometry.tile == t])) for t in tiles]
        return [(t, own) for t, own in taken if len(own)]

    def _rows(self, geometry: Geometry, tile: int) -> Tensor:
        first, n = int(geometry.row[0, tile]), int(geometry.rows[0, tile])
        return first + torch.linspace(0, n - 1, min(self.rows, n)).round().long()


def everything(policy: Policy, n_blocks: int) -> Policy:
    """The policy's scorer with a rule that ranks all blocks, for each head by itself."""
    return policy.replace(rule=TopK(budget=n_blocks, tile_factor=1), share="head")


def last_reads_all(policy: Policy) -> bool:
    """Whether the last tile reads everything, so that no budget changes what it sees."""
    return isinstance(policy.rule, LastTile) and policy.rule.factor == DENSE


def curves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: Policy,
    scale: float,
    sample: Sample,
    softcap: float = 0.0,
    wanted: Sequence[int] = (),
) -> Array:
    """`[H, n_blocks + 1]`: squared error of each head's output at every budget, as a share of the layer's output.

    The layer's squared relative error is the sum over its heads. Budgets below the forced blocks count as these.
    `wanted` are rows to measure on besides the sample. A last tile that reads everything anyway is left out.
    """
    if q.shape[0] != 1:
        raise ValueError(f"curves are measured on one sequence at a time, got a batch of {q.shape[0]}")
    geometry = plan(1, q.shape[2], k.shape[2], policy.block, policy.tile)
    full = everything(policy, geometry.n_blocks)
    ranked = backends.choose("auto", q).rank(q, k, full, geometry, scale)
    forced = geometry.forced_mask(policy.sinks)[0]
    errors = np.zeros((q.shape[1], geometry.n_blocks + 1))
    energy = 0.0
    for tile, rows in sample.of(geometry, policy.sinks, wanted, last=not last_reads_all(policy)):
        order = _whole_order(ranked.order[0, :, tile], forced[tile], int(geometry.visible[0, tile]))
        wrong, size = _tile_errors(q[0], k[0], v[0], rows, order, int(forced[tile].sum()), policy.block, scale, softcap)
        errors[:, : wrong.shape[1]] += wrong
        errors[:, wrong.shape[1] :] += wrong[:, -1:]
        energy += size
    return errors / energy if energy else errors


def _whole_order(ranked: Tensor, forced: Tensor, visible: int) -> Tensor:
    """int64 `[H, visible]`: the forced blocks, then the others as ranked."""
    first = forced.nonzero()[:, 0].expand(ranked.shape[0], -1)
    return torch.cat([first, ranked[:, : visible - first.shape[1]].long()], 1)


def _tile_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    order: Tensor,
    n_forced: int,
    block: int,
    scale: float,
    softcap: float,
) -> tuple[Array, float]:
    """Squared error `[H, visible + 1]` at every budget, summed over the rows, and the squared size of the output."""
    heads, visible = order.shape
    group = heads // k.shape[0]
    end = min(visible * block, k.shape[1])
    keys, values = k[:, :end].float(), v[:, :end].float()
    queries = q[:, rows].float() * scale
    position = rows + k.shape[1] - q.shape[1]
    future = torch.arange(end) > position[:, None]
    wrong = np.zeros((heads, visible + 1))
    total = 0.0
    for h in range(heads):
        logits = queries[h] @ keys[h // group].T
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill_(future, -torch.inf)
        weight = (logits - logits.amax(-1, keepdim=True)).exp()
        padded = torch.unflatten(torch.nn.functional.pad(weight, (0, visible * block - end)), -1, (visible, block))
        inside = torch.nn.functional.pad(values[h // group], (0, 0, 0, visible * block - end))
        above = torch.einsum("rbk,bkd->brd", padded, torch.unflatten(inside, 0, (visible, block)))[order[h]].cumsum(0)
        below = padded.sum(-1).T[order[h]].cumsum(0)
        outputs = above / below[..., None].clamp(min=torch.finfo(below.dtype).tiny)
        error = (outputs - outputs[-1]).square().sum((1, 2)).double().numpy()
        wrong[h, 1:] = error
        wrong[h, :n_forced] = error[n_forced - 1]
        total += float(outputs[-1].square().sum())
    return wrong, total
