"""Rules that give some tiles more blocks than others, and keep as many in all as uniform top-k would.

Such a rule says how much each next block of a cell (one head of one tile) is wanted: a number that never rises along
the ranking. The most wanted blocks of a pool of cells are then taken until the pool's budget is spent, down to one
common level, with a floor and a cap for every cell. All sums are of integers and within one sequence, so that what a
sequence gets depends neither on its neighbours in the batch nor on the order of any sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import MOST, exact, is_number
from ..ranking import Decision, Ranked, margins_at
from ..registry import Setting, must_define, unknown
from ..scorers.reductions import REDUCTIONS, Of
from .base import Rule
from .topk import TopK

AMONG = ("layer", "tile")
MOST_TURNS = 2**31 - 1  # of `deal`: there are no more blocks, for they are numbered in int32


def ordered(x: Tensor) -> Tensor:
    """int64 numbers that compare as these do in float32."""
    bits = (x.float() + 0.0).contiguous().view(torch.int32).to(torch.int64)  # + 0.0: -0 is 0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def sums(values: Tensor, pool: Tensor, n_pools: int) -> Tensor:
    return torch.zeros(n_pools, dtype=torch.int64, device=values.device).index_add_(0, pool, values)


def _bisect(low: Tensor, high: Tensor, fits: Callable[[Tensor], Tensor]) -> Tensor:
    """Finds for every pool the smallest number from `low` to `high` that fits. `fits` is monotonic, and `high` fits."""
    for _ in range((int((high - low).max()) + 1).bit_length()):
        middle = (low + high).div(2, rounding_mode="floor")
        fitting = fits(middle)
        low, high = torch.where(fitting, low, (middle + 1).minimum(high)), torch.where(fitting, middle, high)
    return high


def _above(unwanted: Tensor, level: Tensor) -> Tensor:
    """Counts the slots of each cell that are wanted more than its `level`; `unwanted [cells, W]` is minus how much."""
    return torch.searchsorted(unwanted, -level[:, None]).squeeze(1)


def spend(wanted: Tensor, low: Tensor, high: Tensor, pool: Tensor, total: Tensor, prefer: Tensor) -> Tensor:
    """Gives every pool its `total` most wanted slots. Returns how many each cell got, int64 `[cells]`.

    wanted: int64 `[cells, W]`, never rising along a row. A cell gets its first `low` slots at least and its first
    `high` ones at most (int64 `[cells]`, `high` at most W). pool: the number of the cell's pool; total: int64
    `[pools]`, from the pool's sum of `low` to its sum of `high`. Ties go to the lower slot, then to the cell that
    `prefer`, a permutation of the cells, names first.
    """
    n_pools = len(total)
    unwanted = (-wanted).contiguous()

    def above(level: Tensor) -> Tensor:
        return _above(unwanted, level[pool]).clamp(low, high)

    ends = torch.stack([wanted.min() - 1, wanted.max()])[:, None].expand(2, n_pools)
    level = _bisect(ends[0], ends[1], lambda x: sums(above(x), pool, n_pools) <= total)
    first = above(level)
    left = total - sums(first, pool, n_pools)

    # The slots wanted exactly as much as the level: as many more as fit, the lower slots of all cells first.
    last = above(level - 1)

    def upto(slot: Tensor) -> Tensor:
        return slot[pool].clamp(first, last)

    width = torch.full_like(total, wanted.shape[1])
    slot = _bisect(-width, torch.zeros_like(width), lambda x: sums(upto(-x) - first, pool, n_pools) <= left).neg()
    got = upto(slot)
    left = left - sums(got - first, pool, n_pools)

    return got + _one_each((got == slot[pool]) & (got < last), pool, left, prefer)


def _one_each(among: Tensor, pool: Tensor, left: Tensor, prefer: Tensor) -> Tensor:
    """Gives one more to cells in `among`, preferred ones first, until each pool has spent what it has `left`."""
    order = prefer[torch.sort(pool[prefer], stable=True).indices]
    one, group = among[order].to(torch.int64), pool[order]
    per_pool = sums(one, group, len(left))
    number = one.cumsum(0) - (per_pool.cumsum(0) - per_pool)[group]
    return torch.zeros_like(pool).index_copy_(0, order, one * (number <= left[group]))


def deal(most: Tensor, pool: Tensor, total: Tensor, prefer: Tensor) -> Tensor:
    """Deals the `total` of every pool out in turns. Returns how many each cell got, int64 `[cells]`.

    A turn gives one to each cell that has not its `most` yet; in the last one the cells that `prefer` names first come
    first. `total` is at most the pool's sum of `most`. It is what `spend` gives where all want their n-th slot alike.
    """
    whole = torch.zeros_like(total)  # turns that everybody can have: bit by bit, so that nothing is read back
    for bit in reversed(range(MOST_TURNS.bit_length())):
        more = whole + (1 << bit)
        whole = torch.where(sums(most.minimum(more[pool]), pool, len(total)) <= total, more, whole)
    got = most.minimum(whole[pool])
    return got + _one_each(most > whole[pool], pool, total - sums(got, pool, len(total)), prefer)


def later_first(shape: torch.Size, device: torch.device) -> Tensor:
    """Cells `[B, H, T]` in the order in which ties are settled: later tiles, then lower heads, first."""
    cells = torch.arange(shape.numel(), device=device).view(shape)
    return cells.flip(2).transpose(1, 2).flatten()


@dataclass(frozen=True)
class Pooled(TopK):
    """Keeps, over a whole pool, as many blocks as uniform top-k at the same budget would, where they are wanted most.

    A tile that sees at most `tile_budget` blocks keeps all of them. Of the others, each head keeps at least
    `floor * tile_budget` blocks and at most `cap * tile_budget`, forced ones included (both rounded down). One
    budget is shared `among` all heads and tiles of a sequence (`"layer"`), or the heads of each tile (`"tile"`): the
    pool. The budget can always be kept, and is, to the block. Ties go to the lower rank, then to the later
    tile, then to the lower head.

    A cell counts as triggered if it got more than the tile budget. The margin is that of the cut it came to. Where
    heads are spread over tensor-parallel ranks, the ranks exchange what they want.
    """

    floor: float = 0.5
    cap: float = 4
    among: str = "layer"

    renamed: ClassVar[dict[str, str]] = {"pool": "among"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.floor) or not 0 <= self.floor <= 1:
            above = is_number(self.floor) and self.floor > 1
            blocks = f": {self.floor:g} x {self.tile_budget} blocks are more than the tile budget" if above else ""
            raise ValueError(f"floor must be in [0, 1], a share of the tile budget, got {self.floor!r}{blocks}")
        if not is_number(self.cap) or not 1 <= self.cap < math.inf:
            raise ValueError(f"cap must be at least 1, a multiple of the tile budget, got {self.cap!r}")
        if self.among not in AMONG:
            raise unknown("among", self.among, AMONG)

    def parameters(self) -> set[str]:
        return super().parameters() - (set() if self.fixed_level() is None else {"among"})

    @property
    def least(self) -> int:
        """Blocks that every cell keeps."""
        return math.floor(exact(self.floor) * self.tile_budget)

    @property
    def most(self) -> int:
        """Blocks that no cell exceeds, where it can choose."""
        return min(math.floor(exact(self.cap) * self.tile_budget), MOST)

    def limit(self, n_blocks: int) -> int:
        return min(self.most, n_blocks)

    @property
    def reads_back(self) -> bool:
        return self.fixed_level() is None

    def wanted(self, ranked: Ranked) -> Tensor:
        """int64 `[B, H, T, W]`: how much each ranked block is wanted; never rises along the ranking."""
        raise must_define(self, "wanted(self, ranked)", "int64 [B, H, T, W], how much each ranked block is wanted")

    def fixed_level(self) -> int | None:
        """The level above which blocks are taken, where it is given and no budget has to be met."""
        return None

    def decide(self, ranked: Ranked) -> Decision:
        level = self.fixed_level()
        wanted = self.wanted(ranked)
        wanted, own = ranked.all_heads(wanted) if level is None else (wanted, slice(None))
        shape = wanted.shape[:3]
        forced, visible = ranked.forced, ranked.visible
        eligible = visible > self.tile_budget
        free = visible - forced
        low = torch.where(eligible, (self.least - forced).clamp(min=0), free)
        high = torch.where(eligible, visible.clamp(max=self.most) - forced, free)
        low, high = (x[:, None].expand(shape).reshape(-1) for x in (low, high))
        if level is not None:
            got = _above(-wanted.flatten(0, 2), torch.full_like(low, level)).clamp(low, high)
        else:
            pool = ranked.sequence + 1
            if self.among == "tile":
                pool = torch.arange(pool.numel(), device=pool.device).view_as(pool)
            pool = pool[:, None].expand(shape).reshape(-1)
            uniform = (visible.clamp(max=self.tile_budget) - forced)[:, None].expand(shape).reshape(-1)
            total = sums(uniform, pool, int(pool.max()) + 1)
            got = spend(wanted.flatten(0, 2), low, high, pool, total, later_first(shape, low.device))
        counts = (got.view(shape) + forced[:, None])[:, own]
        return Decision(counts, margins_at(ranked, counts), counts > self.tile_budget)

    def _bounds(self) -> str:
        where = "all heads and tiles" if self.among == "layer" else "the heads of each tile"
        return f"{self.least} to {self.most} a tile, {self.tile_budget} on average over {where}"


@dataclass(frozen=True)
class Weighed(Pooled):
    """A pooled rule that weighs blocks against each other within a tile, and so has to know what scores mean.

    shares: tile scores are estimated shares of softmax mass (the aggregates `mass` and `mass-max`). Otherwise they are
    taken as scaled logits, and a block weighs the exponential of its score. That hardly tells blocks apart if the
    scorer gives votes: use `mass` with those.
    """

    shares: bool = False

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> Rule:
        return super().from_overrides({"shares": _are_shares(overrides.get("aggregate"))} | overrides)

    def check(self, policy: Setting) -> None:
        super().check(policy)
        if self.shares != _are_shares(policy.aggregate):
            meaning = "logits" if self.shares else "estimated shares of softmax mass"
            raise ValueError(
                f"tile scores under aggregate {policy.aggregate!r} are {meaning}: "
                f"make rule {self.name!r} with shares={not self.shares}"
            )


def _are_shares(aggregate: str | None) -> bool:
    """Whether tile scores under this aggregate are estimated shares of softmax mass."""
    return aggregate in REDUCTIONS and REDUCTIONS[aggregate].of is Of.MASS
