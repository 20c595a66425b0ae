"""Our attention as one call, and as a torch custom op that torch.compile keeps in its graph as one opaque node."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..api import PlannedCall
from ..geometry import Geometry, from_segments, plan
from ..policy import Policy
from ..ranking import AllHeads, alone
from ..selection import Selection
from ..summaries import Summaries
from .masks import PADDING, UNSEEN

_c10d: Any = torch.distributed.distributed_c10d if torch.distributed.is_available() else None
_parse = functools.lru_cache(maxsize=64)(Policy.from_json)


class Seen(NamedTuple):
    """The queries, keys and values of a call without what the cache does not hold yet, and where they lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    geometry: Geometry
    row_order: Tensor | None = None  # [B, M], where rows had to move


def _gather(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def see(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, policy: Policy) -> Seen:
    grid = (policy.block, policy.tile)
    if segments is None:
        return Seen(q, k, v, plan(q.shape[0], q.shape[2], k.shape[2], *grid))
    if segments.shape[1] != k.shape[2]:
        if bool((segments != 1).any()):
            raise ValueError(
                f"the model made its mask for {segments.shape[1]} keys but its cache hands out {k.shape[2]}: so "
                "transformers does for models that begin with linear attention (MiniMax); generate for prompts of "
                "one length"
            )
        return Seen(q, k, v, plan(q.shape[0], q.shape[2], k.shape[2], *grid))
    # Unseen keys are the same last ones for the whole batch.
    seen = int((segments[0] != UNSEEN).sum())
    k, v, segments = k[:, :, :seen], v[:, :, :seen], segments[:, :seen].clamp(min=PADDING)
    real = segments != PADDING
    holes = real[:, 1:] & ~real[:, :-1] & (real.cumsum(1)[:, :-1] > 0)
    if not bool(holes.any()):
        return Seen(q, k, v, from_segments(q.shape[2], *grid, segments))
    # Padding between real keys: prompts padded on the right whose cache then grew. Moved out of the way, it makes a
    # sequence one run again: before the earlier keys, and behind the keys of this call's own rows.
    old = seen - q.shape[2]
    first = real[:, :old].to(torch.int8).argsort(dim=1, stable=True)
    last = (~real[:, old:]).to(torch.int8).argsort(dim=1, stable=True)
    order = torch.cat([first, old + last], 1)
    geometry = from_segments(q.shape[2], *grid, segments.gather(1, order))
    return Seen(_gather(q, last), _gather(k, order), _gather(v, order), geometry, last)


class Ran(NamedTuple):
    """What one call returned, kept (None: everything) and took."""

    out: Tensor
    lse: Tensor
    seen: Seen
    kept: Selection | None
    select_seconds: float
    attend_seconds: float


class Call(NamedTuple):
    """One call as an observer sees it: its tensors, what was kept (None: everything), and how logits are made."""

    seen: Seen
    kept: Selection | None
    scale: float
    softcap: float


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    policy: Policy,
    dense_below: int,
    scale: float,
    softcap: float,
    backend: str,
    all_heads: AllHeads = alone,
    summaries: Summaries | None = None,
    prompt_len: int | None = None,
) -> Ran:
    """Attention by the policy, dense where fewer than `dense_below` keys are there.

    `summaries` of the keys' first blocks are used and added to, unless there is padding or packing. `prompt_len`: the
    keys that the prompt has in the end; what comes after them was decoded, and is nobody's last tile.
    """
    start = time.perf_counter()
    seen = see(q, k, v, segments, policy)
    known = summaries if seen.geometry.whole and seen.row_order is None else None
    chosen = backends.choose(backend, q)
    prompt_len = None if prompt_len is None or prompt_len < seen.k.shape[2] else prompt_len
    call = PlannedCall(seen.q, seen.k, policy, seen.geometry, scale, chosen, all_heads, known, dense_below, prompt_len)
    looked = time.perf_counter() - start
    out, lse, kept, select_seconds, attend_seconds = call.run(seen.v, softcap)
    if seen.row_order is not None:
        back = seen.row_order.argsort(1)
        out, lse = _gather(out, back), _gather(lse[..., None], back)[..., 0]
    return Ran(out, lse, seen, kept, looked + select_seconds, attend_seconds)


def heads_over(group: str) -> AllHeads:
    """Brings in the heads of the ranks of a process group, given by its name; the empty name is this process alone."""
    if not group:
        return alone
    resolved: Any = _c10d._resolve_process_group(group)

    def gather(margin: Tensor) -> tuple[Tensor, slice]:
        parts = [torch.empty_like(margin) for _ in range(torch.distributed.get_world_size(resolved))]
        torch.distributed.all_gather(parts, margin.contiguous(), group=resolved)
        heads, rank = margin.shape[1], torch.distributed.get_rank(resolved)
        return torch.cat(parts, 1), slice(rank * heads, (rank + 1) * heads)

    return gather


@torch.library.custom_op("closecall::attached", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    policy: str,
    dense_below: int,
    scale: float,
    softcap: float,
    backend: str,
    group: str,
    prompt_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`run` with a policy as JSON and a process group by name."""
    given = (_parse(policy), dense_below, scale, softcap, backend, heads_over(group))
    ran = run(q, k, v, segments, *given, prompt_len=prompt_len)
    return ran.out, ran.lse


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return backends.empty_outputs(q, v)
