"""All that the diagnosis knows of a tile: order statistics of its scores, their noise, and what the cut really lost.

One row for each head of a tile, in the columns of `COLUMNS`. Only the tiles that see more blocks than the expanded
budget have rows: elsewhere expansion keeps everything and there is nothing to decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from closecall.geometry import plan
from closecall.policy import Policy
from closecall.rules.router import Router
from closecall.scorers.base import Scorer

from .gaps import Tiles, floors, gaps
from .loss import row_shares

# Name: (type, what it is). `Gaps` names are those of Eq. 12; `_bf16` is what scores rounded to bfloat16 would give.
# A cell with a score, or a row, that is not a finite number has NaN (in the file: null) in all of its statistics.
COLUMNS: dict[str, tuple[str, str]] = {
    "example": ("int32", "which prompt"),
    "layer": ("int32", "which layer"),
    "head": ("int32", "which query head"),
    "tile": ("int32", "which tile of the prompt"),
    "visible": ("int32", "blocks that the tile sees"),
    "keep": ("int32", "unforced blocks that the plain cut keeps, the paper's k"),
    "expanded": ("int32", "and the expanded cut, its rho k"),
    "cutoff": ("float32", "g, from the last kept score to the first dropped one"),
    "expansion": ("float32", "G, from the last kept score to the first one dropped after expansion"),
    "spread": ("float32", "r, from the best score to the first dropped one"),
    "margin": ("float32", "sigma = g / r"),
    "cutoff_bf16": ("float32", ""),
    "expansion_bf16": ("float32", ""),
    "spread_bf16": ("float32", ""),
    "margin_bf16": ("float32", ""),
    "tau": ("float32", "tau-hat of this cell: row-to-row roughness of the unforced blocks' scores"),
    "floor": ("float32", "smallest spacing of the ranked scores other than the cut's"),
    "spacing_p10": ("float32", "10th percentile of these spacings"),
    "spacing_p50": ("float32", "and their median"),
    "ties": ("float32", "share of all spacings that are exactly 0"),
    "ties_bf16": ("float32", ""),
    "lost": ("float32", "softmax mass that the plain cut drops, mean over the tile's rows"),
    "lost_most": ("float32", "the same of the row that loses most"),
    "lost_expanded": ("float32", "what the expanded cut drops, mean over rows"),
    "estimated": ("float32", "`lost` as the row scores estimate it, forced blocks weighed exactly"),
    "estimated_expanded": ("float32", "`lost_expanded` likewise"),
    "tail": ("float32", "share of the dropped blocks in a softmax of the tile's ranked scores alone"),
    "tail_expanded": ("float32", "of the blocks dropped after expansion"),
    "gold": ("int32", "unforced gold blocks of what is asked in this tile; 0 where nothing is, or nobody knows"),
    "gold_lost": ("int32", "how many of them the plain cut drops"),
    "gold_lost_expanded": ("int32", "and the expanded cut"),
}
STATISTICS = tuple(name for name, (kind, _) in COLUMNS.items() if kind == "float32")


@dataclass(frozen=True, eq=False)
class Rows:
    """The cells of one tile under one scorer: a tensor `[H]` for every column but `example` and `layer`, and the ranked
    scores `[H, free blocks]`."""

    columns: dict[str, Tensor]
    scores: Tensor


def router_of(policy: Policy) -> Router:
    """Returns the rule that says where a policy cuts and expands; ValueError if it has none."""
    if not isinstance(policy.rule, Router):
        raise ValueError(f"{policy.name} never expands a tile: take a router, as router-on-quest")
    if policy.pool > 1:
        raise ValueError(f"pool = {policy.pool}: noise is told from the scores of single rows: diagnose with pool=1")
    if policy.share == "group":
        raise ValueError("share = 'group': noise is told from the scores of single heads: diagnose with share='head'")
    return policy.rule


def check_scorer(scorer: Scorer | None) -> Scorer:
    """Raises ValueError for a scorer that cannot be diagnosed."""
    if scorer is None or type(scorer).row_scores is Scorer.row_scores:
        name = scorer.name if scorer else "none"
        raise ValueError(
            f"scorer {name!r} does not score rows one by one, so its noise cannot be told: take mean or quest"
        )
    return scorer


def check_context(tokens: int, policy: Policy) -> None:
    """Raises ValueError if no tile sees more blocks than the expanded budget, and says which context would do."""
    rule = router_of(policy)
    if rule.tile_budget <= policy.most_forced:
        raise ValueError(
            f"tile budget {rule.tile_budget} must exceed the {policy.most_forced} blocks that a tile can be forced to "
            "keep: use a larger budget"
        )
    if -(-tokens // policy.block) <= rule.expanded_budget:
        enough = rule.expanded_budget * policy.block + 1
        raise ValueError(
            f"no tile of {tokens} tokens sees more than {rule.expanded_budget} blocks, the expanded budget "
            f"({rule.rho:g} x tile budget {rule.tile_budget}): use a context of at least {enough} tokens, or a smaller "
            "budget"
        )


def measure(
    q: Tensor,
    k: Tensor,
    policies: Sequence[Policy],
    *,
    scale: float,
    softcap: float = 0.0,
    gold: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[list[Rows]]:
    """Yields, tile by tile, the cells of a whole prompt `q [H, M, D]`, `k [Hkv, M, D]` under each policy's scorer.

    The policies differ in their scorers only. gold: by tile, the blocks that what is asked there depends on.
    """
    first = policies[0]
    g = plan(1, q.shape[1], k.shape[1], first.block, first.tile)
    summaries = [check_scorer(p.scorer).summarise(k, p.block) for p in policies]
    grouped = torch.unflatten(q, 0, (k.shape[0], -1))
    check_context(k.shape[1], first)
    for _, t, rows, keys, pos in g.tiles():
        if int(g.visible[0, t]) <= router_of(first).expanded_budget:
            continue
        shares, weight = row_shares(q, k, rows, keys.stop, block=g.block, scale=scale, softcap=softcap)
        own = pos // g.block
        place = _Place(t, int(g.visible[0, t]), first.sinks, own, (gold or {}).get(t, ()))
        yield [
            _tile(p, grouped[:, :, rows], tuple(s[:, None, place.free] for s in summary), shares, weight, place, scale)
            for p, summary in zip(policies, summaries, strict=True)
        ]


@dataclass(frozen=True)
class _Place:
    tile: int
    visible: int
    sinks: int
    own: int  # the first block that overlaps the tile's rows
    gold: Sequence[int]

    @property
    def free(self) -> slice:
        """The unforced blocks: they lie between the sinks and the tile's own, and every row sees all their keys."""
        return slice(self.sinks, self.own)

    @property
    def forced(self) -> int:
        return self.visible - (self.own - self.sinks)


def _tile(
    policy: Policy, rows: Tensor, summary: tuple[Tensor, ...], shares: Tensor, weight: Tensor, place: _Place,
    scale: float,
) -> Rows:  # fmt: skip
    rule, scorer = router_of(policy), check_scorer(policy.scorer)
    row_scores = (scale * scorer.row_scores(rows, summary)).flatten(0, 1).float()  # [H, rows, free]
    tile_scores = policy.reduction(row_scores)
    broken = ~tile_scores.isfinite().all(-1)
    ranked, order = tile_scores.nan_to_num(nan=-torch.inf).sort(dim=-1, descending=True, stable=True)
    keep, expanded = rule.tile_budget - place.forced, rule.expanded_budget - place.forced
    heads = ranked.shape[0]

    def by_rank(x: Tensor) -> Tensor:
        """`[H, rows, free]` in the order of the ranking."""
        return x.gather(-1, order[:, None].expand_as(x))

    forced = weight + (shares[..., : place.sinks].sum(-1) + shares[..., place.own :].sum(-1)).log()
    guessed = torch.cat([forced[..., None], by_rank(row_scores) + math.log(policy.block)], -1).softmax(-1)[..., 1:]
    held, tail = by_rank(shares[..., place.free]), ranked.softmax(-1)
    lost, steps = held[..., keep:].sum(-1), row_scores.double().diff(dim=1)
    broken = (broken | ~lost.isfinite().all(-1)).cpu()
    columns: dict[str, Tensor] = {
        "tau": (steps.square().mean((1, 2)) / 2).sqrt() if steps.shape[1] else torch.full((heads,), torch.nan),
        "lost": lost.mean(-1),
        "lost_most": lost.amax(-1),
        "lost_expanded": held[..., expanded:].sum(-1).mean(-1),
        "estimated": guessed[..., keep:].sum(-1).mean(-1),
        "estimated_expanded": guessed[..., expanded:].sum(-1).mean(-1),
        "tail": tail[:, keep:].sum(-1),
        "tail_expanded": tail[:, expanded:].sum(-1),
    }
    columns |= {name: torch.full((heads,), torch.nan) for name in STATISTICS if name not in columns}
    if not bool(broken.all()):
        for name, values in _order_statistics(Tiles.of(ranked[~broken], keep, expanded)).items():
            columns[name][~broken] = values.float().cpu()
    whole = {"head": torch.arange(heads)}
    constants = {"tile": place.tile, "visible": place.visible, "keep": keep, "expanded": expanded}
    whole |= {name: torch.full((heads,), value) for name, value in constants.items()}
    whole |= _gold(order + place.sinks, keep, expanded, place)
    real = {name: values.float().cpu().masked_fill(broken, torch.nan) for name, values in columns.items()}
    return Rows(whole | real, ranked.cpu())


def _order_statistics(tiles: Tiles) -> dict[str, Tensor]:
    keep = int(tiles.keep[0])
    columns: dict[str, Tensor] = {"floor": floors(tiles)}
    for ending, these in (("", tiles), ("_bf16", tiles.as_bfloat16())):
        g = gaps(these)
        columns |= {f"{name}{ending}": getattr(g, name) for name in ("cutoff", "expansion", "spread", "margin")}
        spacing = these.scores[:, :-1] - these.scores[:, 1:]
        columns[f"ties{ending}"] = (spacing == 0).double().mean(1)
    spacing = tiles.scores[:, :-1] - tiles.scores[:, 1:]
    other = torch.cat([spacing[:, : keep - 1], spacing[:, keep:]], 1)
    if other.shape[1]:
        columns["spacing_p10"], columns["spacing_p50"] = other.quantile(torch.tensor([0.1, 0.5]).to(other), dim=1)
    return columns


def _gold(order: Tensor, keep: int, expanded: int, place: _Place) -> dict[str, Tensor]:
    free = range(place.sinks, place.own)
    wanted = torch.tensor(sorted({b for b in place.gold if b in free}), dtype=order.dtype, device=order.device)
    has = (order[..., None] == wanted).any(-1)  # [H, free]
    return {
        "gold": torch.full((order.shape[0],), len(wanted)),
        "gold_lost": has[:, keep:].sum(1).cpu(),
        "gold_lost_expanded": has[:, expanded:].sum(1).cpu(),
    }
