"""Chooses how many blocks a tuned policy keeps: as asked for, the fewest that meet a target, or the most that pay.

Then, at as many keys, on which grid and with how many protected tiles: another one is taken if the text, and its end,
are read better by it, in no more time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from closecall import Policy
from closecall.rules.last_tile import LastTile

from ..spine.numbers import size
from ..spine.table import Column, Table
from .fit import Fit
from .judge import END, Judge, Verdict

# How much more time than the best so far still counts as no more: single runs vary. Time is held against dense of the
# same run: a command that was stopped may go on while the machine does something else.
SLACK = 1.05
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of a context's blocks: the mean budgets that a search tries


@dataclass(frozen=True)
class Goal:
    """What is wanted: exactly one of a mean tile budget, a KL to dense at most, a speed-up of the prefill at least."""

    mean: float | None = None
    kl: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        wanted = [value for value in asdict(self).values() if value is not None]
        if len(wanted) != 1:
            raise ValueError(f"tuning takes one goal, a budget, a KL or a speed-up, got {len(wanted)}")
        if not 0 < wanted[0] < math.inf:
            raise ValueError(f"the goal must be a number above 0, got {wanted[0]:g}")

    def ladder(self, n_blocks: int, least: int) -> list[float]:
        """The mean budgets to try, in order: from few blocks up for a KL, from many down for a speed-up."""
        if self.mean is not None:
            return [self.mean]
        steps = [float(round(n_blocks * share)) for share in SHARES if n_blocks * share >= least]
        if not steps:
            raise ValueError(
                f"a context of {n_blocks} blocks is too short to search: the largest share that is tried, "
                f"{SHARES[-1]:g}, has fewer than the {least} blocks that a tile needs; use a longer --context"
            )
        return steps if self.kl is not None else steps[::-1]

    def met(self, verdict: Verdict) -> bool:
        if self.kl is not None:
            return verdict.kl <= self.kl
        return self.speedup is None or verdict.speedup >= self.speedup

    def missed(self, tried: Sequence[Candidate]) -> str:
        """What no policy reached, and the nearest one."""
        if self.kl is not None:
            near = min(tried, key=lambda c: c.verdict.kl)
            nearest = f"the nearest, {near.mean:g} blocks, has {near.verdict.kl:.4g}"
            return f"no policy has a KL of at most {self.kl:g}: {nearest}"
        near = max(tried, key=lambda c: c.verdict.speedup)
        return (
            f"no policy is {self.speedup:g} times as fast as dense: the fastest, {near.mean:g} blocks, is "
            f"{near.verdict.speedup:.2f} times as fast; try a longer --context"
        )


@dataclass(frozen=True)
class Candidate:
    """A policy, its mean tile budget, and how it did."""

    label: str
    mean: float
    policy: Policy
    verdict: Verdict


@dataclass(frozen=True)
class Tuned:
    """The policy that meets the goal, the same blocks spread evenly, and all that was tried on the way."""

    chosen: Candidate
    even: Candidate
    tried: list[Candidate]
    context: int
    base: Policy  # whose scorer, grid and protection the chosen one has

    @property
    def measured(self) -> dict[str, Any]:
        """What stands in the policy's file."""
        return {
            "context": self.context,
            "mean_tile_budget": self.chosen.mean,
            "grid": f"{self.base.block}/{self.base.tile}",
            "protected_tiles": protected(self.base),
            "tuned": asdict(self.chosen.verdict),
            "same blocks for every head": asdict(self.even.verdict),
        }

    def table(self) -> Table:
        columns = [
            Column("policy", "label", left=True),
            Column("mean budget", "mean", "g"),
            Column("blocks a tile", "kept_blocks", ".1f"),
            Column("kept", "kept_share", ".1%"),
            Column("KL to dense", "kl", ".4f"),
            Column("at the end", "end_kl", ".4f"),
            Column("loss", "loss_change", "+.4f"),
            Column("same choice", "agreement", ".1%"),
            *([Column("answers", _answers, left=True)] if self.chosen.verdict.dense_answers else []),
            Column("prefill / dense", lambda r: r["seconds"] / r["dense_seconds"], ".2f"),
        ]
        rows = [{"label": c.label, "mean": c.mean} | asdict(c.verdict) for c in [*self.tried, self.even]]
        notes = [
            f"Chosen: {self.chosen.label}. On text that was not fitted on; at the end: its last {END} tokens.",
            "Dense is our own kernel; times are of single runs.",
        ]
        if self.chosen.verdict.dense_answers:
            notes.append("Answers: those of dense that stay, and the nats that a token of one loses.")
        return Table(f"Tuned at {size(self.context)}", columns, rows, notes)


def _answers(row: dict[str, Any]) -> str:
    """Answers that stay of those that dense gives, and what a token of one loses."""
    return f"{row['answers']} of {row['dense_answers']} (-{row['answer_loss']:.2f})"


def search(fit: Fit, base: Policy, goal: Goal, judge: Judge, context: int) -> Tuned:
    """Tries mean budgets until one meets the goal. Raises if none does, with the nearest."""
    n_blocks = fit.curves.shape[2] - 1
    tried: list[Candidate] = []
    for mean in goal.ladder(n_blocks, base.most_forced + 1):
        policy = fit.policy(base, mean)
        candidate = Candidate("tuned", mean, policy, judge.verdict(policy))
        tried.append(candidate)
        if goal.met(candidate.verdict):
            return Tuned(candidate, _alike(fit, base, mean, judge), tried, context, base)
    raise ValueError(goal.missed(tried))


def _alike(fit: Fit, base: Policy, mean: float, judge: Judge) -> Candidate:
    even = fit.even(base, mean)
    return Candidate("every head alike", mean, even, judge.verdict(even))


def protected(base: Policy) -> int:
    """How many last tiles a policy protects."""
    return base.rule.tiles if isinstance(base.rule, LastTile) else 0


def refine(
    tuned: Tuned,
    goal: Goal,
    judge: Judge,
    fits: Callable[[Policy], Fit],
    grids: Sequence[tuple[int, int]],
    tiles: Sequence[int],
) -> Tuned:
    """Tries other grids at as many keys, then, on the best of them, other numbers of protected tiles."""
    best, base, tried = tuned.chosen, tuned.base, list(tuned.tried)

    def consider(other: Policy, label: str) -> None:
        nonlocal best, base
        mean = tuned.chosen.mean * tuned.base.block / other.block
        policy = fits(other).policy(other, mean)
        candidate = Candidate(label, mean, policy, judge.verdict(policy))
        tried.append(candidate)
        better = candidate.verdict.harm < best.verdict.harm
        if goal.met(candidate.verdict) and better and SLACK * candidate.verdict.speedup >= best.verdict.speedup:
            best, base = candidate, other

    for block, tile in grids:
        if (block, tile) != (tuned.base.block, tuned.base.tile):
            consider(tuned.base.replace(block=block, tile=tile), f"tuned, grid {block}/{tile}")
    for n in tiles:
        if isinstance(base.rule, LastTile) and n != base.rule.tiles:
            consider(base.replace(rule=dataclasses.replace(base.rule, tiles=n)), f"{best.label}, last {n} tiles")
    if best is tuned.chosen:
        return dataclasses.replace(tuned, tried=tried)
    return Tuned(best, _alike(fits(base), base, best.mean, judge), tried, tuned.context, base)
