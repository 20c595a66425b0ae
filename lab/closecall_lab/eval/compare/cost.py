"""What choosing costs: time, as a multiple of Quest's on the same tensors, and what has to be stored for each block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from closecall.api import select
from closecall.policy import Policy, policy
from closecall.rules.topk import TopK

from ...spine.timing import Contender, interleave
from ..spec import Spec

QUEST = "quest"


@dataclass(frozen=True)
class Cost:
    """What one policy costs at one budget. `ratio`: to quest with top-k at that budget, median over rounds of both."""

    policy: str
    budget: int
    tile_budget: int | None
    vectors: float | None  # stored for each block; None where nothing is
    milliseconds: float
    ratio: float


def vectors_per_block(made: Policy) -> float | None:
    return None if made.scorer is None else made.scorer.vectors_per_block


def costs(
    variants: Sequence[tuple[Spec, int]], q: Tensor, k: Tensor, scale: float, *, seconds: float, most_rounds: int = 50
) -> list[Cost]:
    """Times `select` for every policy, in turn; about `seconds` for each budget. Dense and matched controls choose
    nothing of their own and are left out."""
    threads = torch.get_num_threads()
    listed = []
    for budget in sorted({b for spec, b in variants if spec.has_budget}):
        policies = {str(s): s.policy(budget) for s, b in variants if b == budget and s.control != "matched"}
        grid = next(iter(policies.values()))
        factor = grid.rule.tile_factor or TopK.tile_factor
        quest = policy(QUEST, budget=budget, tile_factor=factor, block=grid.block, tile=grid.tile)
        timed = {QUEST: quest} | policies
        contenders = [
            Contender.of(name, functools.partial(select, q, k, made, scale=scale), threads)
            for name, made in timed.items()
        ]
        samples = interleave(contenders, seconds=seconds, most_rounds=most_rounds)
        for name, made in timed.items():
            ratio = samples.ratio(name, QUEST)
            assert ratio is not None
            tile_budget = made.rule.tile_budget
            times = (1e3 * samples.median(name), ratio)
            listed.append(Cost(name, budget, tile_budget, vectors_per_block(made), *times))
    return listed
