"""Our attention as a torch custom op, so that torch.compile keeps it in the graph as one opaque call."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import backends
from ..geometry import Geometry, from_segments, plan
from ..policy import Policy
from ..selection import check_forced, covers_everything, select_planned
from .masks import PADDING, UNSEEN

_parse = functools.lru_cache(maxsize=64)(Policy.from_json)


def see(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, policy: Policy) -> tuple[Tensor, Tensor, Geometry]:
    """The keys and values seen so far, and the geometry of the call."""
    if segments is None:
        return k, v, plan(q.shape[0], q.shape[2], k.shape[2], policy.block, policy.tile)
    # Unseen keys are the same last ones for the whole batch.
    seen = int((segments[0] != UNSEEN).sum())
    k, v, segments = k[:, :, :seen], v[:, :, :seen], segments[:, :seen].clamp(min=PADDING)
    return k, v, from_segments(q.shape[2], policy.block, policy.tile, segments)


@torch.library.custom_op("closecall::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    policy: str,
    dense_below: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention by the policy (JSON), dense where fewer than `dense_below` keys are there."""
    chosen = _parse(policy)
    k, v, geometry = see(q, k, v, segments, chosen)
    backend = backends.choose("auto", q)
    kept = None
    if k.shape[2] >= dense_below and not covers_everything(chosen, geometry):
        check_forced(chosen, geometry)
        kept = select_planned(q, k, chosen, geometry, scale, backend)
    return backend.attend(q, k, v, kept, geometry, scale, softcap)


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    policy: str,
    dense_below: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, heads, rows, v.shape[3]), q.new_empty(batch, heads, rows, dtype=torch.float32)
