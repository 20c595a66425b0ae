"""The rule that stops when it can prove that enough was kept, or when its budget ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..block_mass import (
    Arithmetic,
    Keys,
    longest_so_far,
    norms,
    share_above,
    summarise_keys,
    weight_above,
    weight_below,
)
from ..checks import MOST, is_number, is_whole
from ..ranking import Decision, Ranked, Source, margins_at
from ..registry import Setting
from .base import RULES, Rule


@RULES.register("certified")
@dataclass(frozen=True)
class Certified(Rule):
    """Adds blocks in score order until no row of the tile can have lost more than `eps` of its softmax mass.

    A tile keeps its forced blocks and at most `max_budget` blocks in all. The proof weighs forced blocks exactly, other
    kept blocks from below and dropped ones from above, without looking at their keys one by one; a tile that stops
    before `max_budget` certifies at `eps` under `closecall.certify` too. Tiles that reach `max_budget` promise
    nothing. The proof does not hold with a softcap: there, use `certify`.

    Each head and tile decides for itself. Heads that share their blocks add blocks until the proof holds for the rows
    of all. The margin is that of the final cut.
    """

    eps: float = 0.1
    max_budget: int = 132

    def __post_init__(self) -> None:
        if not is_number(self.eps) or not 0 < self.eps < 1:
            raise ValueError(f"eps must be in (0, 1), a share of a row's softmax mass, got {self.eps!r}")
        if not is_whole(self.max_budget) or not 1 <= self.max_budget <= MOST:
            raise ValueError(
                f"max_budget must be a whole number of blocks, at least 1 and at most {MOST:,}, got {self.max_budget!r}"
            )

    def check(self, policy: Setting) -> None:
        if self.max_budget <= policy.most_forced:
            raise ValueError(
                f"max_budget {self.max_budget} must exceed the {policy.most_forced} blocks that a tile can be forced "
                f"to keep ({policy.sinks} sink, the rest its own): use at least {policy.most_forced + 1}"
            )

    @property
    def reads_back(self) -> bool:
        return True

    def limit(self, n_blocks: int) -> int:
        return min(self.max_budget, n_blocks)

    def decide(self, ranked: Ranked) -> Decision:
        source = ranked.source
        if source is None:
            raise ValueError("rule 'certified' judges rows: call it through closecall.select, which hands it q and k")
        q, k, g = source.q, source.k, source.geometry
        group = q.shape[1] // k.shape[1]
        counts = ranked.forced[:, None].expand(ranked.order.shape[:3]).clone()
        more = (ranked.visible > ranked.forced).tolist()
        for b, tiles, _, span in g.spans():
            free = [t for t in range(tiles.start, tiles.stop) if more[b][t]]
            for shared in range(k.shape[1] if free else 0):
                keys, longest = summarise_keys(k[b, shared, span], g.block), longest_so_far(k[b, shared, span])
                each = ranked.order.shape[1] // k.shape[1]  # 1 where the heads of a key head share
                heads = slice(shared * each, (shared + 1) * each)
                for t in free:
                    order = ranked.order[b, heads, t].expand(group, -1)
                    needed = self._needed(source, order, keys, longest, b, shared, t)
                    counts[b, heads, t] += needed if each == group else needed.amax()
        return Decision(counts, margins_at(ranked, counts), torch.zeros_like(counts, dtype=torch.bool))

    def _needed(
        self, source: Source, order: Tensor, keys: Keys, longest: Tensor, b: int, shared: int, t: int
    ) -> Tensor:
        """int64 `[heads]`: how many of the ranked blocks each head of one tile and key head must keep."""
        g, q, k = source.geometry, source.q, source.k
        group, dim = order.shape[0], q.shape[3]
        at, n, pos = int(g.row[b, t]), int(g.rows[b, t]), int(g.pos[b, t])
        own = pos // g.block
        sinks = min(source.sinks, own)
        room = min(self.max_budget - (int(g.visible[b, t]) - own + sinks), own - sinks)  # beside the forced ones
        rows = q[b, shared * group : (shared + 1) * group, at : at + n].flatten(0, 1).double()

        # Forced blocks, key by key. Their positions: the sinks', and the tile's own.
        own_start, stop = own * g.block, pos + n
        place = torch.cat([torch.arange(sinks * g.block), torch.arange(own_start, stop)]).to(q.device)
        logits = source.scale * (rows @ k[b, shared, int(g.key[b, t]) + place].double().mT)
        row_place = (pos + torch.arange(n, device=q.device)).repeat(group)
        forced = logits.masked_fill(place > row_place[:, None], -torch.inf).logsumexp(1)

        # What certify will take off the backend's sum, which may itself be that much below the exact one, as may be
        # the sum above for float64 tensors.
        arithmetic = Arithmetic(q.dtype, dim, 0.0)
        size = source.scale * norms(rows) * longest[stop - 1]
        n_keys = int(g.visible[b, t]) * g.block
        most = torch.tensor(self.max_budget, device=q.device)
        slack = 3 * arithmetic.lse_error(size, n_keys, most, size + math.log(n_keys))  # no sum is further from 0

        # Unforced blocks are whole for every row of the tile, and lie between the sinks and its own.
        free = keys.part(sinks, own)
        seen = free.size.expand(rows.shape[0], -1)
        above = weight_above(rows, free, source.scale, seen).view(group, n, -1)
        below = weight_below(rows, free, source.scale).view(group, n, -1)
        taken = (order[:, :room].long() - sinks)[:, None].expand(-1, n, -1)
        rest = above.scatter(2, taken, -torch.inf).logsumexp(2, keepdim=True)
        # Column c of both: what is dropped and kept when c ranked blocks are.
        dropped = torch.cat([above.gather(2, taken), rest], 2).flip(2).logcumsumexp(2).flip(2)
        kept = torch.cat([forced.view(group, n, 1), below.gather(2, taken)], 2).logcumsumexp(2)
        mass = share_above(dropped, kept - slack.view(group, n, 1), 2 * free.size.numel() + len(place))
        enough = (mass <= self.eps).all(1)
        enough[:, -1] = True  # the budget ends
        return enough.to(torch.int8).argmax(1)

    def describe(self) -> str:
        return f"blocks until every row has provably lost at most {self.eps:g} of its mass, {self.max_budget} at most"
