"""Rules: from a tile's ranked blocks to how many it keeps, and the router's triggers.

Every rule here keeps the forced blocks and a prefix of the ranking, so a rule only has to say how long the prefix is.
That is why any rule runs on any scorer and any backend: backends rank, rules count, kernels read the kept blocks.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .geometry import Geometry
from .policy import RULES, Component, Policy, Registry

# From this process's margins [B, H, T] (or how much a pooled rule wants each block, [B, H, T, W]) to those of all heads
# of the layer, and which of them are its own: where heads are spread over tensor-parallel ranks, rules see them all.
AllHeads = Callable[[Tensor], tuple[Tensor, slice]]


def alone(margin: Tensor) -> tuple[Tensor, slice]:
    """One process has all heads."""
    return margin, slice(None)


@dataclass(frozen=True, eq=False)
class Source:
    """What was ranked, for rules that judge rows and not only tile scores."""

    q: Tensor
    k: Tensor
    geometry: Geometry
    scale: float
    sinks: int


@dataclass(frozen=True, eq=False)
class Ranked:
    """The visible, unforced blocks of every tile, best first; ties go to the lower block index."""

    order: Tensor  # int32 [B, H, T, W]: block indices, the sentinel past the end
    scores: Tensor  # float32 [B, H, T, W]: their scores, -inf past the end; a NaN score counts as -inf
    visible: Tensor  # int64 [B, T]: number of visible blocks
    forced: Tensor  # int64 [B, T]: number of forced blocks
    sequence: Tensor  # int64 [B, T]: the tile's sequence
    all_heads: AllHeads = alone
    source: Source | None = None  # always there when `select` asks a rule


@dataclass(frozen=True, eq=False)
class Decision:
    """What a rule made of a ranking. `counts` includes the forced blocks. All `[B, H, T]`."""

    counts: Tensor
    margin: Tensor
    triggered: Tensor


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def margins(ranked: Ranked, tile_budget: int) -> Tensor:
    """Eq. 4 per (sequence, head, tile): how decisive the cut at `tile_budget` was, NaN where nothing was cut.

    `(s[c-1] - s[c]) / (s[0] - s[c])` over the unforced scores, c = tile_budget - forced. Zero, the least decided value,
    where the denominator is zero or infinities leave the quotient undefined.
    """
    width = ranked.scores.shape[-1]
    cut = (tile_budget - ranked.forced).clamp(1, width - 1) if width > 1 else torch.ones_like(ranked.forced)
    if width == 1:  # one slot: no tile can have more visible blocks than the budget
        return torch.full(ranked.scores.shape[:-1], torch.nan, device=ranked.scores.device)
    at = cut[:, None, :, None].expand(*ranked.scores.shape[:-1], 1)
    first_out = ranked.scores.gather(-1, at).squeeze(-1)
    last_in = ranked.scores.gather(-1, at - 1).squeeze(-1)
    margin = ((last_in - first_out) / (ranked.scores[..., 0] - first_out)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    eligible = (ranked.visible > tile_budget)[:, None]
    return margin.masked_fill(~eligible, torch.nan)


def margins_at(ranked: Ranked, counts: Tensor) -> Tensor:
    """Eq. 4 at the cut each cell came to, NaN where nothing was cut; 1 where it kept no ranked block at all."""
    free = counts - ranked.forced[:, None]
    at = free.clamp(0, ranked.scores.shape[-1] - 1)[..., None]
    first_out, last_in = (ranked.scores.gather(-1, i).squeeze(-1) for i in (at, (at - 1).clamp(min=0)))
    margin = ((last_in - first_out) / (ranked.scores[..., 0] - first_out)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    margin = margin.masked_fill(free == 0, 1.0)
    return margin.masked_fill(counts >= ranked.visible[:, None], torch.nan)


def fixed_point(margin: Tensor) -> Tensor:
    """Margins as int64 in units of 2^-50, NaN as 0. Integer sums do not depend on the order of the heads, on the batch
    or on how heads are spread over ranks, so neither does the choice of tiles."""
    return (margin.double().nan_to_num(nan=0.0) * 2.0**50).round().to(torch.int64)


def share(q: float, totals: Tensor) -> Tensor:
    """ceil(q * totals), exactly, for the decimal the user typed (0.07 * 100 is 7, not 8)."""
    f = Fraction(str(q)).limit_denominator(10**9)  # keeps the product below within int64
    found = (f.numerator * totals + f.denominator - 1) // f.denominator
    return found.maximum(totals.clamp(max=1)) if q > 0 else found


def lowest(key: Tensor, eligible: Tensor, group: Tensor, q: float) -> Tensor:
    """Marks, in each group, the ceil(q * eligible) eligible entries of smallest key; ties go to the later entry.

    All arguments are flat. Written with sorts and counts only, so that it needs no host synchronisation on a device.
    """
    n = key.numel()
    group = group.clamp(min=-1) + 1  # entries of no sequence share group 0, where nothing is eligible
    by_key = torch.arange(n - 1, -1, -1, device=key.device)
    by_key = by_key[torch.sort(key[by_key], stable=True).indices]
    by_key = by_key[torch.sort((~eligible[by_key]).to(torch.int8), stable=True).indices]
    by_key = by_key[torch.sort(group[by_key], stable=True).indices]
    n_groups = n + 1
    size = torch.zeros(n_groups, dtype=torch.int64, device=key.device).index_add_(0, group, torch.ones_like(group))
    total = torch.zeros_like(size).index_add_(0, group, eligible.to(torch.int64))
    place = torch.arange(n, device=key.device) - (size.cumsum(0) - size)[group[by_key]]
    chosen = torch.empty(n, dtype=torch.bool, device=key.device)
    chosen[by_key] = place < share(q, total)[group[by_key]]
    return chosen & eligible


TRIGGERS: Registry[Trigger] = Registry("trigger")


@dataclass(frozen=True)
class Trigger(Component):
    """Says which eligible tiles the router expands."""

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        """bool `[B, H, T]` from margins `[B, H, T]`, eligibility `[B, T]` and sequence ids `[B, T]`."""
        raise NotImplementedError

    def for_layer(self, index: int) -> Trigger:
        """The trigger of one layer of a model: itself, unless it was fitted layer by layer."""
        return self

    def made_for(self) -> tuple[int, ...] | None:
        """The layers it was fitted to; None where it suits every layer of every model."""
        return None

    def describe(self, q: float) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class _TileShare(Trigger):
    """Expands ceil(q T) of a sequence's T eligible tiles, for all heads alike: those with the smallest key."""

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        """int64 `[B, T]`."""
        raise NotImplementedError

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        key = self.tile_key(margin, sequence)
        chosen = lowest(key.flatten(), eligible.flatten(), sequence.flatten(), q).view_as(eligible)
        return chosen[:, None].expand_as(margin)


@TRIGGERS.register("quantile")
@dataclass(frozen=True)
class Quantile(_TileShare):
    """The method: the tiles whose margin, averaged over all heads, is smallest in their sequence (Eq. 5)."""

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        return fixed_point(margin).sum(1)

    def describe(self, q: float) -> str:
        return f"the least decided {q:.0%} of tiles"


@TRIGGERS.register("random")
@dataclass(frozen=True)
class Random(_TileShare):
    """Control: as many tiles as the quantile, drawn by a seed. A tile's draw does not depend on the batch."""

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be a whole number in [0, 2^31), got {self.seed!r}")

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        # The tile's number within its own sequence, so that packing and batching change nothing.
        tile = torch.arange(sequence.shape[1], device=sequence.device).expand_as(sequence)
        new = torch.ones_like(sequence, dtype=torch.bool)
        new[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
        number = tile - torch.where(new, tile, 0).cummax(1).values
        # Xorshift mixing in 31 bits; int64 never overflows.
        x = ((number + 1) * 2654435761 + self.seed * 40503 + 12345) & 0x7FFFFFFF
        for shift, factor in ((16, 73244475), (15, 73244475), (16, 1)):
            x = ((x ^ (x >> shift)) * factor) & 0x7FFFFFFF
        return x

    def describe(self, q: float) -> str:
        return f"a random {q:.0%} of tiles (seed {self.seed})"


@TRIGGERS.register("last")
@dataclass(frozen=True)
class Last(_TileShare):
    """Control: as many tiles as the quantile, always the last ones."""

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        return torch.zeros_like(sequence)  # ties go to the later tile

    def describe(self, q: float) -> str:
        return f"the last {q:.0%} of tiles"


@TRIGGERS.register("per-cell")
@dataclass(frozen=True)
class PerCell(Trigger):
    """Rejected by the paper: the smallest margins among all (head, tile) cells; ties go to the later cell."""

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        cells = [x[:, None].expand_as(margin).flatten() for x in (eligible, sequence)]
        return lowest(fixed_point(margin).flatten(), cells[0], cells[1], q).view_as(margin)

    def describe(self, q: float) -> str:
        return f"the least decided {q:.0%} of (head, tile) cells"


@TRIGGERS.register("absolute")
@dataclass(frozen=True)
class Absolute(Trigger):
    """Rejected by the paper: every cell whose margin is at most a fixed threshold, whatever the layer. Ignores q."""

    threshold: float = 0.05

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1] like the margin it is compared with, got {self.threshold!r}")

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        return (margin <= self.threshold) & eligible[:, None]

    def describe(self, q: float) -> str:
        return f"every cell with margin at most {self.threshold:g}"


@dataclass(frozen=True)
class Rule(Component):
    """Turns rankings into kept counts."""

    needs_scores = True

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> Rule:
        return RULES.make(cls.name, overrides)

    def check(self, policy: Policy) -> None:
        """Called when a policy is made with this rule; warns or raises if the two cannot work together."""

    def limit(self, n_blocks: int) -> int:
        """The most blocks any tile may keep, forced ones included: how far backends must rank."""
        raise NotImplementedError

    def limits(self, sequence: Tensor, n_blocks: int) -> Tensor | None:
        """`[B, T]`: how far each tile must be ranked, where that differs; a backend may rank further, up to `limit`."""
        return None

    def decide(self, ranked: Ranked) -> Decision:
        raise NotImplementedError

    def _parts(self) -> dict[str, Rule | Trigger]:
        """The triggers and rules it is made of, by field."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: part for name, part in fields if isinstance(part, (Rule, Trigger))}

    def for_layer(self, index: int) -> Rule:
        """The rule of one layer of a model: itself, unless a part of it was fitted layer by layer."""
        parts = self._parts()
        there = {name: part.for_layer(index) for name, part in parts.items()}
        return dataclasses.replace(self, **there) if any(there[name] is not parts[name] for name in parts) else self

    def made_for(self) -> tuple[int, ...] | None:
        """The layers that a part of it was fitted to; None where it suits every layer of every model."""
        return next((layers for part in self._parts().values() if (layers := part.made_for()) is not None), None)

    def describe(self) -> str:
        raise NotImplementedError


@RULES.register("dense")
@dataclass(frozen=True)
class Dense(Rule):
    """Keeps every visible block."""

    needs_scores = False

    def limit(self, n_blocks: int) -> int:
        return n_blocks

    def describe(self) -> str:
        return "every visible block"


@RULES.register("topk")
@dataclass(frozen=True)
class TopK(Rule):
    """Step 2: the best `tile_factor * budget` blocks, forced ones included."""

    budget: int = 33
    tile_factor: float = 2

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 1:
            raise ValueError(f"budget must be a whole number of blocks, at least 1, got {self.budget!r}")
        product = self.tile_factor * self.budget if is_number(self.tile_factor) else math.nan
        if not product >= 1 or not math.isfinite(product) or product != round(product):
            raise ValueError(
                f"tile_factor * budget must be a whole number of blocks, at least 1, "
                f"got {self.tile_factor!r} * {self.budget} = {product!r}"
            )

    @property
    def tile_budget(self) -> int:
        return round(self.tile_factor * self.budget)

    def limit(self, n_blocks: int) -> int:
        return min(self.tile_budget, n_blocks)

    def decide(self, ranked: Ranked) -> Decision:
        margin = margins(ranked, self.tile_budget)
        counts = ranked.visible.clamp(max=self.tile_budget)[:, None].expand_as(margin)
        return Decision(counts, margin, torch.zeros_like(margin, dtype=torch.bool))

    def describe(self) -> str:
        return f"keep {self.tile_budget} blocks a tile (budget {self.budget} x {self.tile_factor:g})"


@RULES.register("router")
@dataclass(frozen=True)
class Router(TopK):
    """Steps 3-5: top-k, and `rho` times as many blocks for the tiles the trigger picks."""

    q: float = 0.40
    rho: float = 2
    trigger: Trigger = Quantile()

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> Rule:
        params = dict(overrides)
        if isinstance(params.get("trigger"), str):
            params["trigger"] = TRIGGERS.make(params["trigger"], overrides)
        return RULES.make(cls.name, params)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.trigger, dict):  # from JSON
            object.__setattr__(self, "trigger", TRIGGERS.from_dict(self.trigger))
        if not isinstance(self.trigger, Trigger):
            raise TypeError(f"trigger must be a Trigger or one of {', '.join(TRIGGERS.names())}, got {self.trigger!r}")
        if not is_number(self.q) or not 0 <= self.q <= 1:
            raise ValueError(f"q must be in [0, 1], the fraction of tiles to expand, got {self.q!r}")
        if not is_number(self.rho) or not 1 <= self.rho < math.inf:
            raise ValueError(f"rho must be at least 1, the factor of a triggered tile's budget, got {self.rho!r}")

    def check(self, policy: Policy) -> None:
        if self.tile_budget - policy.most_forced <= 1:
            warnings.warn(
                f"tile budget {self.tile_budget} can leave one free block beside {policy.most_forced} forced ones: "
                "the margin is then 1 for every tile and decides nothing; use a larger budget",
                stacklevel=5,
            )

    @property
    def expanded_budget(self) -> int:
        """Blocks a triggered tile keeps; rounded down where rho is not whole, so that no tile exceeds rho times k."""
        return math.floor(self.rho * self.tile_budget + 1e-9)

    def limit(self, n_blocks: int) -> int:
        return min(self.expanded_budget, n_blocks)

    def decide(self, ranked: Ranked) -> Decision:
        margin = margins(ranked, self.tile_budget)
        eligible = ranked.visible > self.tile_budget
        everyone, mine = ranked.all_heads(margin)
        triggered = self.trigger.fire(everyone, eligible, ranked.sequence, self.q)[:, mine]
        plain = ranked.visible.clamp(max=self.tile_budget)[:, None]
        expanded = ranked.visible.clamp(max=self.expanded_budget)[:, None]
        return Decision(torch.where(triggered, expanded, plain), margin, triggered)

    def describe(self) -> str:
        return f"{super().describe()}, {self.expanded_budget} for {self.trigger.describe(self.q)}"
