"""What one layer did with a prompt: who kept what, how close each cut was, and what the dropped blocks really held."""

from __future__ import annotations

import copy
import dataclasses
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from closecall import backends
from closecall.certify.certificate import certify
from closecall.geometry import Geometry
from closecall.hf.op import Call
from closecall.policy import Policy
from closecall.ranking import Ranked, margins_at
from closecall.rules.base import Rule
from closecall.selection import Selection, each_head, select_all

from ..theory.loss import row_shares
from . import codes
from .codes import Cells, Floats

CLOSE = 0.02  # a dropped block is a close call if it missed the cut by less than this share of the way from best to cut
LISTED = 150  # close calls of each kind that a page lists
COARSEST = 64  # a coarse map has at most about so many rows and columns


class CloseCall(NamedTuple):
    """One block that a tile left out by little. `mass`: what the block really holds, NaN where nobody looked."""

    missed_by: float
    mass: float
    layer: int
    head: int
    tile: int
    block: int


@dataclass(frozen=True, eq=False)
class Question:
    """What all layers are asked: the plan's cells, who asks, and where the answer stands."""

    cells: Cells
    asking: tuple[int, ...]
    answer: tuple[int, ...]
    truth: bool


@dataclass(eq=False)
class Looked:
    """One layer. Arrays are `[H, T]` or `[H, N]`; strings are packed as `codes` says."""

    layer: int
    kept: str
    scores: str
    masses: str
    coarse: dict[str, str]
    margin: Floats  # the policy's own, of the cut it judged
    cut_margin: Floats  # of the cut each tile came to: the two differ where a trigger moved it
    triggered: NDArray[np.bool_]
    counts: NDArray[np.int64]
    lost: Floats  # mass of the dropped blocks, mean over the tile's rows
    lost_most: Floats  # and of the row that lost most
    keepers: NDArray[np.int64]  # tiles that keep the block, of those that may choose it
    block_mass: Floats  # mass of the block, mean over the tiles that see it
    bound: Floats  # [H]: what any row of the last tile can have lost at most, proven without looking at dropped keys
    asked: NDArray[np.bool_]  # [asking tiles, answer blocks, H]: kept
    calls: Calls
    sums: dict[str, Floats] = field(default_factory=dict)  # `[cells]` over heads, for the mean of all


class Calls:
    """The close calls worth listing: the closest, the costliest, and those on the answer. Counts all of them."""

    def __init__(self) -> None:
        self.count = 0
        self.on_answer = 0
        self._closest: list[CloseCall] = []
        self._costliest: list[CloseCall] = []
        self._answer: list[CloseCall] = []

    def add(self, found: list[CloseCall], on_answer: list[CloseCall]) -> None:
        self._closest = heapq.nsmallest(LISTED, [*self._closest, *found])
        costly = [call for call in found if call.mass == call.mass]
        self._costliest = heapq.nlargest(LISTED, [*self._costliest, *costly], key=lambda call: call.mass)
        self._answer = heapq.nsmallest(LISTED, [*self._answer, *on_answer])

    def merge(self, other: Calls) -> None:
        self.count += other.count
        self.on_answer += other.on_answer
        self.add([*other._closest, *other._costliest], other._answer)
        self._closest = sorted(set(self._closest))[:LISTED]
        self._costliest = sorted(set(self._costliest), key=lambda call: -call.mass)[:LISTED]

    def listed(self) -> list[CloseCall]:
        """Each once, closest first."""
        return sorted({*self._closest, *self._costliest, *self._answer})


def pool_of(geometry: Geometry) -> int:
    """How many cells a coarse map puts into one, along each side."""
    return max(2, -(-max(geometry.n_tiles, geometry.n_blocks) // COARSEST))


def look(layer: int, call: Call, policy: Policy, question: Question) -> Looked:
    """One layer of a prompt that came in one call. Works on one key head at a time, and of that tile by tile."""
    seen, g = call.seen, call.seen.geometry
    heads = seen.q.shape[1]
    kept = call.kept if call.kept is not None else select_all(g, heads, seen.q.device)
    parts = [
        _look_at_group(layer, seen.q, seen.k, kept, group, policy if call.kept is not None else None, call, question)
        for group in _groups(heads, seen.k.shape[1])
    ]
    whole: dict[str, Any] = {
        name: np.concatenate([part[name] for part in parts])
        for name in ("kept", "scores", "masses", "cut_margin", "lost", "lost_most", "keepers", "block_mass")
    }
    coarse = {name: np.concatenate([part["coarse"][name] for part in parts]) for name in parts[0]["coarse"]}
    calls = Calls()
    for part in parts:
        calls.merge(part["calls"])
    asked = kept.kept_mask((0,))[:, list(question.asking)][..., list(question.answer)]
    return Looked(
        layer=layer,
        kept=codes.packed(whole["kept"]),
        scores=codes.packed(whole["scores"]) if call.kept is not None else "",
        masses=codes.packed(whole["masses"]) if question.truth else "",
        coarse={name: codes.packed(x) for name, x in coarse.items()},
        margin=kept.margin[0].float().cpu().numpy(),
        cut_margin=whole["cut_margin"],
        triggered=kept.triggered[0].cpu().numpy(),
        counts=kept.counts[0].long().cpu().numpy(),
        lost=whole["lost"],
        lost_most=whole["lost_most"],
        keepers=whole["keepers"],
        block_mass=whole["block_mass"],
        bound=_proven(call),
        asked=asked.permute(1, 2, 0).cpu().numpy(),
        calls=calls,
        sums={name: sum(part["sums"][name] for part in parts) for name in parts[0]["sums"]},
    )


def _groups(heads: int, shared: int) -> Iterator[tuple[int, slice]]:
    """Every key head with the query heads that read it."""
    size = heads // shared
    for i in range(shared):
        yield i, slice(i * size, (i + 1) * size)


def _look_at_group(
    layer: int, q: Tensor, k: Tensor, kept: Selection, group: tuple[int, slice], policy: Policy | None, call: Call,
    question: Question,
) -> dict[str, Any]:  # fmt: skip
    shared, heads = group
    g, cells = kept.geometry, question.cells
    mask = kept.kept_mask((0, heads)).cpu().numpy()  # [G, T, N]
    unforced = cells.seen & ~forced_mask(g, policy.sinks if policy else 0)
    place, cut_margin = np.full(mask.shape, np.nan), np.full(mask.shape[:2], np.nan)
    if policy is not None:
        place, cut_margin = _places(q[:, heads], k[:, shared : shared + 1], kept, heads, policy, call.scale)
    mass, lost, most = _masses(q[0, heads], k[0, shared : shared + 1], mask, call, g, question.truth)
    dropped = np.where(mask, 0.0, mass)
    share = mask.astype(np.float64)
    coarse = {"kept": codes.linear_codes(cells.coarse(share))}
    sums: dict[str, Floats] = {"kept": cells.flat(share).sum(0)}
    if policy is not None:
        coarse["scores"] = codes.score_codes(cells.coarse(np.nan_to_num(np.clip(place, -1, 1), nan=1.0)))
        sums["scores"] = cells.flat(np.nan_to_num(np.clip(place, -1, 1), nan=0.0)).sum(0)
    if question.truth:
        coarse["masses"] = codes.mass_codes(cells.coarse(mass))
        coarse["lost"] = codes.mass_codes(cells.coarse(dropped))
        sums["masses"], sums["lost"] = cells.flat(mass).sum(0), cells.flat(dropped).sum(0)
    return {
        "kept": codes.kept_bits(cells.flat(mask)),
        "scores": codes.score_codes(cells.flat(place), cells.flat(mask)),
        "masses": codes.mass_codes(cells.flat(mass)),
        "coarse": coarse,
        "sums": sums,
        "cut_margin": cut_margin,
        "lost": lost,
        "lost_most": most,
        "keepers": (mask & unforced).sum(1),
        "block_mass": mass.sum(1) / np.maximum(cells.seen.sum(0), 1),
        "calls": _close_calls(layer, heads.start, place, cut_margin, mask, mass, question),
    }


def forced_mask(geometry: Geometry, sinks: int) -> NDArray[np.bool_]:
    """`[T, N]`: blocks that a tile keeps whatever their score."""
    found: NDArray[np.bool_] = geometry.forced_mask(sinks)[0].numpy()
    return found


@dataclass(frozen=True)
class _Widest(Rule):
    """Another rule that may keep as many blocks as there are to choose from: backends then rank all of them, as they
    would for the rule it wraps."""

    name = "widest"
    rule: Rule
    most: int

    @property
    def tile_budget(self) -> int | None:
        return self.rule.tile_budget

    def limit(self, n_blocks: int) -> int:
        return min(self.most, n_blocks)

    def every_row(self, sequence: Tensor) -> Tensor | None:
        return self.rule.every_row(sequence)


def rank_all(q: Tensor, k: Tensor, policy: Policy, geometry: Geometry, scale: float) -> Ranked:
    """The ranking that the policy's rule was given, but of all blocks it could have been given, and for every head.
    Those are a tile's candidates where the policy has some."""
    wide = copy.copy(policy)
    most = policy.n_candidates(geometry.n_blocks) or geometry.n_blocks
    # Not by replace: only rules with a public name pass there.
    object.__setattr__(wide, "rule", _Widest(policy.rule, most))
    ranked = backends.choose("auto", q).rank(q, k, wide, geometry, scale)
    group = q.shape[1] // ranked.order.shape[1]
    return dataclasses.replace(ranked, order=each_head(ranked.order, group), scores=each_head(ranked.scores, group))


def _places(q: Tensor, k: Tensor, kept: Selection, heads: slice, policy: Policy, scale: float) -> tuple[Floats, Floats]:
    """Every ranked block's place on its tile's scale `[G, T, N]`, NaN where it was not ranked; and the margin of the
    cut `[G, T]`, NaN where nothing was cut."""
    g = kept.geometry
    ranked = rank_all(q, k, policy, g, scale)
    counts = kept.counts[:, heads].long()
    margin = margins_at(ranked, counts)[0]
    free = (counts - ranked.forced[:, None])[0]
    listed = (ranked.order[0] < g.n_blocks).sum(-1)
    scores = ranked.scores[0].double()
    zero = scores.gather(-1, torch.minimum(free, listed - 1).clamp(0, scores.shape[-1] - 1)[..., None])
    best = scores[..., :1]
    place = ((scores - zero) / (best - zero)).nan_to_num(nan=0.0, posinf=0.0, neginf=-1.0)
    there = torch.arange(scores.shape[-1], device=scores.device) < listed[..., None]
    by_block = torch.full((*place.shape[:2], g.n_blocks + 1), torch.nan, dtype=place.dtype, device=place.device)
    order = torch.where(there, ranked.order[0].long(), g.n_blocks)
    by_block.scatter_(-1, order, place)
    return by_block[..., :-1].cpu().numpy(), margin.double().cpu().numpy()


def _masses(
    q: Tensor, k: Tensor, mask: NDArray[np.bool_], call: Call, g: Geometry, truth: bool
) -> tuple[Floats, Floats, Floats]:
    """Mass of every block `[G, T, N]`, mean over the tile's rows; what each tile lost `[G, T]`: the mean, the most."""
    mass = np.full(mask.shape, 0.0 if truth else np.nan)
    lost, most = (np.full(mask.shape[:2], np.nan) for _ in range(2))
    for _, t, rows, keys, _ in g.tiles() if truth else ():
        shares, _ = row_shares(q, k, rows, keys.stop, block=g.block, scale=call.scale, softcap=call.softcap)
        seen = shares.shape[-1]
        out = torch.from_numpy(~mask[:, None, t, :seen]).to(shares.device)
        dropped = (shares * out).sum(-1)
        mass[:, t, :seen] = shares.mean(1).cpu().numpy()
        lost[:, t], most[:, t] = dropped.mean(1).cpu().numpy(), dropped.amax(1).cpu().numpy()
    return mass, lost, most


def _close_calls(
    layer: int, head: int, place: Floats, margin: Floats, kept: NDArray[np.bool_], mass: Floats, question: Question
) -> Calls:
    calls = Calls()
    with np.errstate(invalid="ignore"):
        missed_by = margin[..., None] - place  # NaN where nothing was cut, and for forced blocks
        close = ~kept & (missed_by < CLOSE)
    at = np.argwhere(close)
    by, held = missed_by[close], mass[close]
    answering = np.isin(at[:, 1], question.asking) & np.isin(at[:, 2], question.answer)

    def made(chosen: NDArray[np.intp]) -> list[CloseCall]:
        return [
            CloseCall(float(by[i]), float(held[i]), layer, head + int(at[i, 0]), int(at[i, 1]), int(at[i, 2]))
            for i in chosen
        ]

    calls.add(made(np.union1d(np.argsort(by)[:LISTED], np.argsort(-held)[:LISTED])), made(np.flatnonzero(answering)))
    calls.count, calls.on_answer = len(at), int(answering.sum())
    return calls


def _proven(call: Call) -> Floats:
    """`closecall.certify` of the last tile alone, the worst of its rows, for every head."""
    seen, g = call.seen, call.seen.geometry
    if call.kept is None:
        return np.zeros(seen.q.shape[1])
    rows = int(g.rows[0, -1])
    last = Selection.from_blocks(
        call.kept.kv_idx[:, :, -1:], call.kept.counts[:, :, -1:], q_len=rows, k_len=g.k_len, block=g.block, tile=g.tile
    )
    found = certify(seen.q[:, :, -rows:], seen.k, seen.v, last, scale=call.scale, softcap=call.softcap)
    return found.mass[0].amax(-1).double().cpu().numpy()
