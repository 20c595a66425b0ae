"""Policies for prompts that come in chunks: what a tile keeps must not depend on how its prompt was cut.

An engine cuts prompts as it likes, takes prefixes from a cache and starts again after preemption. A tile then knows its
own rows, the blocks before it and where the prompt ends; it does not know the prompt's other tiles. So:

- uniform top-k, rules that pool the heads of one tile, and `top-p` or `max-ratio` with a fixed level decide tile by
  tile: they mean the same.
- The router's quantile compares all tiles of a prompt, so it cannot be used here. Thresholds calibrated for each layer
  (`closecall calibrate`) can, and so can an absolute one.
- `last-tile`, and with it `auto`, protects the last tiles of the *prompt*. The other tiles do not pay for them, because
  they may have been computed before the prompt's end was known: the mean rises by the extra blocks.
- Scorers must judge a block by a summary of its keys. Those that look at other rows or at the whole prompt do not.

Paged calls promise all of that. Calls on tensors that say how long the prompt is (`prompt_len`) promise the third
point: their chunks need not begin on the tile grid, and their routers see the tiles of one chunk together.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from .geometry import Geometry
from .policy import Policy
from .rules.base import Rule
from .rules.dense import Dense
from .rules.last_tile import LastTile
from .rules.per_head import PerHead
from .rules.pooled import Pooled
from .rules.router import Router
from .rules.topk import TopK
from .scorers.base import Scorer
from .triggers.absolute import Absolute
from .triggers.calibrated import Calibrated


def chunk_proof(policy: Policy) -> Policy:
    """The policy as it must be for prompts in chunks, or a ValueError that says why there is none."""
    scorer = policy.scorer
    if scorer is not None and type(scorer).scan is not Scorer.scan:
        raise ValueError(
            f"scorer {scorer.name!r} looks at more than a tile's rows and block summaries, so what it says depends "
            "on how a prompt is cut into chunks: use mean, quest, box or outliers"
        )
    if policy.tile % policy.block:
        raise ValueError(
            f"tile {policy.tile} is no multiple of block {policy.block}: what a tile's own blocks hold would depend on "
            f"how a prompt is cut into chunks: use tile={policy.block * -(-policy.tile // policy.block)}"
        )
    rule = _rule(policy.rule)
    return policy if rule is policy.rule else policy.replace(rule=rule)


def is_chunk_proof(policy: Policy) -> bool:
    """Whether the policy, as it is, means the same however prompts are cut."""
    try:
        return chunk_proof(policy) is policy
    except ValueError:
        return False


def _rule(rule: Rule) -> Rule:
    if isinstance(rule, LastTile):
        inner = _rule(rule.rule)
        return dataclasses.replace(rule, rule=inner, pay=False) if rule.pay or inner is not rule.rule else rule
    if isinstance(rule, Router):
        if isinstance(rule.trigger, Calibrated | Absolute):
            return rule
        raise ValueError(
            f"trigger {rule.trigger.name!r} compares all tiles of a prompt, and in chunks there is no such moment: "
            "calibrate thresholds for this model with `closecall calibrate`, and use the policy it writes"
        )
    if type(rule) in (Dense, TopK, PerHead):
        return rule
    if isinstance(rule, Pooled) and (rule.among == "tile" or rule.fixed_level() is not None):
        return rule
    raise ValueError(
        f"rule {rule.name!r} does not decide tile by tile from tile scores, and in chunks a prompt's tiles are never "
        "seen together: use topk, last-tile, a pooled rule with among='tile', or a router with calibrated thresholds"
    )


def protected_tiles(rule: Rule) -> int:
    """How many last tiles of a prompt a chunk-proof rule protects."""
    return rule.tiles if isinstance(rule, LastTile) else 0


def within_prompt(policy: Policy, geometry: Geometry, prompt_len: int | None) -> tuple[Policy, Geometry]:
    """The policy and the geometry of a call that is a chunk of a prompt of so many keys.

    A call that holds the whole prompt, or does not say (None), is what it is: its other tiles pay for the last ones.
    """
    if prompt_len is None or geometry.q_len == prompt_len:
        return policy, geometry
    to_come = prompt_len - geometry.k_len
    if not isinstance(policy.rule, LastTile):
        return policy, _within(geometry, to_come) if policy.unpooled else geometry
    return _unpaid(policy), _asking(geometry, policy.rule.tiles, to_come)


@functools.lru_cache(maxsize=64)
def _unpaid(policy: Policy) -> Policy:
    """The policy, a `last-tile` one, whose last tiles nobody pays for."""
    assert isinstance(policy.rule, LastTile)
    return policy.replace(rule=dataclasses.replace(policy.rule, pay=False))


@functools.lru_cache(maxsize=64)
def _asking(geometry: Geometry, tiles: int, to_come: int) -> Geometry:
    """The geometry that knows which tiles are among the last of a prompt that has `to_come` more rows."""
    within = _within(geometry, to_come)
    return dataclasses.replace(within, asking=geometry.sequence.where(within.among_last(tiles), -1))


@functools.lru_cache(maxsize=64)
def _within(geometry: Geometry, to_come: int) -> Geometry:
    """The geometry that knows how many tiles follow each in a prompt that has `to_come` more rows.

    Sequences that end before the buffer does, padded on the right or packed, are over. Layers share the answer.
    """
    after = geometry.from_end
    last = torch.arange(geometry.n_tiles) + after
    goes_on = (geometry.key + geometry.end).gather(1, last) == geometry.k_len
    return dataclasses.replace(geometry, after=after + torch.where(goes_on, -(-to_come // geometry.tile), 0))
