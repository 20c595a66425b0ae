"""Protection of the last tiles, which hold the question of most prompts, on top of any rule."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checks import exact, is_number
from ..geometry import from_end
from ..placed import placed
from ..ranking import Decision, Ranked, Source, margins_at
from ..registry import Setting
from .base import RULES, Rule
from .pooled import deal, later_first, sums
from .topk import TopK

DENSE = "dense"
MOST_FACTOR = 10**6  # exact in int64, and more blocks than any tile sees
TWICE = 2  # of what `rule` gives: as far as lists of kept blocks go for tiles that would read everything


@RULES.register("last-tile")
@dataclass(frozen=True)
class LastTile(Rule):
    """Decides as `rule` does, but the last tile of each sequence keeps `factor` times the blocks that `rule` gives it.

    factor: the product is rounded down to whole blocks, forced ones included. `"dense"` means every block the last tile
        sees. That is all or nothing: where the others cannot pay for it, the last tiles get up to twice as many blocks,
        so no list of kept blocks is ever longer than that.
    tiles: how many last tiles are protected. A long question, or one at the start of a short last tile, needs two.
    pay: the blocks are taken, head by head, from the other tiles that can choose, as evenly as whole blocks allow (odd
        ones from earlier tiles), so that the mean stays that of `rule`. Where few tiles can pay, the last ones get only
        what these can give. Without `pay` the mean rises.
    give: the largest share of their unforced blocks that the other tiles give, all together. No single tile gives more
        than half of its own.

    A policy that pools rows scores every row of the protected tiles.

    The last tile is that of the call, unless the caller says how long the prompt is (`prompt_len` of `select` and
    `attention`, see `closecall.chunks`): then it is the prompt's, and a chunk without it protects none.
    """

    rule: Rule = field(default_factory=TopK)
    factor: float | str = 2
    pay: bool = True
    tiles: int = 1
    give: float = 0.5

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> Rule:
        """Makes the inner `rule` too, from the other overrides; it may be an instance, a name or left out (top-k)."""
        own = {name: overrides[name] for name in ("factor", "pay", "tiles", "give") if name in overrides}
        inner = overrides.get("rule", TopK.name)
        rest = {key: value for key, value in overrides.items() if key != "rule"}
        if isinstance(inner, str):
            inner = RULES[inner].from_overrides(rest)
        elif isinstance(inner, Rule):
            inner = inner.with_overrides(rest)
        return cls(rule=inner, **own)

    def __post_init__(self) -> None:
        if isinstance(self.rule, dict):  # from JSON
            object.__setattr__(self, "rule", RULES.from_dict(self.rule))
        if not isinstance(self.rule, Rule):
            raise TypeError(f"rule must be a Rule, got {self.rule!r}")
        if isinstance(self.rule, LastTile):
            raise ValueError(f"rule {self.name!r} would protect the last tile twice: give it another rule")
        if self.rule.tile_budget is None:
            raise ValueError(f"rule {self.rule.name!r} has no tile budget that the last tile could get more of")
        if self.factor != DENSE and not (is_number(self.factor) and 1 <= float(self.factor) <= MOST_FACTOR):
            raise ValueError(f"factor must be {DENSE!r} or a number from 1 to {MOST_FACTOR:,}, got {self.factor!r}")
        if not isinstance(self.pay, bool):
            raise TypeError(f"pay must be True or False, got {self.pay!r}")
        if not isinstance(self.tiles, int) or isinstance(self.tiles, bool) or self.tiles < 1:
            raise ValueError(f"tiles must be a whole number of tiles, at least 1, got {self.tiles!r}")
        if not is_number(self.give) or not 0 < self.give <= 0.5:
            raise ValueError(f"give must be above 0 and at most 0.5, a share of the others' blocks, got {self.give!r}")

    def parameters(self) -> set[str]:
        return super().parameters() - (set() if self.pay else {"give"})

    @property
    def tile_budget(self) -> int:
        assert self.rule.tile_budget is not None  # checked above
        return self.rule.tile_budget

    @property
    def tile_factor(self) -> float | None:
        return self.rule.tile_factor

    def remedy(self, tile_budget: int) -> str:
        return self.rule.remedy(tile_budget)

    def check(self, policy: Setting) -> None:
        self.rule.check(policy)

    @property
    def at_ranks(self) -> bool:
        return self.rule.at_ranks

    @property
    def reads_back(self) -> bool:
        return self.rule.reads_back

    def limit(self, n_blocks: int) -> int:
        factor = TWICE if self.factor == DENSE else self.factor
        return min(_part(self.rule.limit(n_blocks), factor), n_blocks)

    def every_row(self, sequence: Tensor) -> Tensor:
        """The protected tiles: the question is often a single row, which a mean would drown."""
        last, inner = _last(sequence, self.tiles), self.rule.every_row(sequence)
        return last if inner is None else last | inner

    def limits(self, sequence: Tensor, n_blocks: int) -> Tensor:
        inner = self.rule.limits(sequence, n_blocks)
        others = torch.full_like(sequence, self.rule.limit(n_blocks)) if inner is None else inner
        if self._nobody_pays(sequence):
            return others
        return torch.where(_last(sequence, self.tiles), self.limit(n_blocks), others)

    def _nobody_pays(self, sequence: Tensor) -> bool:
        """Whether every tile is a last one and would have to pay for itself, as in a decoding step."""
        return self.pay and sequence.shape[1] <= self.tiles

    def decide(self, ranked: Ranked) -> Decision:
        inner = self.rule.decide(ranked)
        sequence = ranked.sequence if ranked.asking is None else ranked.asking
        if self._nobody_pays(sequence):
            return inner
        if type(self.rule) is TopK and ranked.source is not None:
            moved, expanded = self._moved_by_plan(ranked.source, ranked.visible.device)
        else:
            moved, expanded = self.moved(inner.counts, ranked.visible, ranked.forced, sequence)
        counts = inner.counts + moved
        margin = torch.where(moved != 0, margins_at(ranked, counts).to(inner.margin.dtype), inner.margin)
        return dataclasses.replace(inner, counts=counts, margin=margin, triggered=inner.triggered | expanded)

    def _moved_by_plan(self, source: Source, device: torch.device) -> tuple[Tensor, Tensor]:
        """`[B, 1, T]`: top-k keeps what the plan allows, whatever the scores, so all heads and layers share one answer,
        settled on the host."""
        geometry, sinks = source.geometry, source.sinks

        def make() -> tuple[Tensor, Tensor]:
            counts = geometry.visible.clamp(max=self.tile_budget)[:, None]
            moved, expanded = self.moved(counts, geometry.visible, geometry.forced(sinks), geometry.told)
            return moved.to(device), expanded.to(device)

        return placed(geometry, device, (self, sinks), make)

    def moved(self, counts: Tensor, visible: Tensor, forced: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how many blocks each tile gains (loses, below zero) over `counts [B, H, T]`, and which tiles gain."""
        last = _last(sequence, self.tiles)
        seen = visible[:, None]
        more = seen if self.factor == DENSE else _part(counts, self.factor).minimum(seen)
        extra = torch.where(last[:, None], more - counts, 0)
        paid = torch.zeros_like(extra)
        if self.pay:
            payers = ((visible > self.tile_budget) & ~last)[:, None]
            free = torch.where(payers, counts - forced[:, None], 0).clamp(min=0)
            modest = torch.where(last[:, None], _part(counts, TWICE).minimum(seen) - counts, 0)
            extra, paid = self._settle(extra, modest, free, sequence)
        return extra - paid, extra > 0

    def _settle(self, extra: Tensor, modest: Tensor, free: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Settles, head by head, what the last tiles get and what the others pay out of their `free` blocks.

        The last tiles ask for `extra` blocks; where they want all and cannot get all, for the `modest` ones.
        """
        shape = extra.shape
        heads = torch.arange(shape[1], device=extra.device)[:, None]
        pool = (_runs(sequence)[:, None] * shape[1] + heads).flatten()
        n_pools = extra.numel()  # at most: how many there are, only the device could tell
        asked, most, theirs = (sums(x.flatten(), pool, n_pools) for x in (extra, free // 2, free))
        can = most.minimum(_part(theirs, self.give))
        if self.factor == DENSE:
            extra = torch.where((asked > can)[pool].view(shape), modest, extra)
            asked = sums(extra.flatten(), pool, n_pools)
        total = asked.minimum(can)
        earlier_first = torch.arange(extra.numel(), device=extra.device)
        paid = deal((free // 2).flatten(), pool, total, earlier_first)
        if self.tiles == 1:  # nobody to share with
            got = extra.flatten().minimum(total[pool])
        else:
            got = deal(extra.flatten(), pool, total, later_first(shape, extra.device))
        return got.view(shape), paid.view(shape)

    def describe(self) -> str:
        more = "every block" if self.factor == DENSE else f"{self.factor:g} times as many"
        paid = f", paid for by the others with at most {self.give:.3g} of theirs" if self.pay else ""
        which = "tile" if self.tiles == 1 else f"{self.tiles} tiles"
        return f"{self.rule.describe()}; {more} for the last {which}{paid}"


def _runs(sequence: Tensor) -> Tensor:
    """int64 `[B, T]`: the tiles' sequences, numbered in the order in which they come."""
    begins = torch.ones_like(sequence)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    return begins.flatten().cumsum(0).view_as(sequence) - 1


def _last(sequence: Tensor, tiles: int) -> Tensor:
    """bool `[B, T]`: the tiles that are protected. Remembered on the host alone: what a device computes is ready for
    the stream that asked, and for no other."""
    return _last_on_host(sequence, tiles) if sequence.device.type == "cpu" else _find_last(sequence, tiles)


def _find_last(sequence: Tensor, tiles: int) -> Tensor:
    return (sequence >= 0) & (from_end(sequence) < tiles)


# By the identity of the plan's table, which `plan` shares between calls and nobody writes to.
_last_on_host = functools.lru_cache(maxsize=64)(_find_last)


@functools.lru_cache(maxsize=64)
def _ratio(factor: float) -> tuple[int, int]:
    return exact(factor, 10**6).as_integer_ratio()


Counts = TypeVar("Counts", int, Tensor)


def _part(counts: Counts, factor: float | str) -> Counts:
    """`factor` times as many, rounded down; in integers, so that 1.1 times 10 is 11."""
    above, below = _ratio(float(factor))
    return counts * above // below
