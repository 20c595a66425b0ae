"""The native CPU backend: hands raw pointers and strides to our own kernels (native/).

`CLOSECALL_ISA` forces a tier (amx, avx512bf16, avx512, avx2, portable). It is read at every call, so tests cover all.
Threads are torch's own, as many as `torch.get_num_threads()` says.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry import Geometry
from ..policy import Policy
from ..ranking import Ranked
from ..registry import unknown
from ..scorers.reductions import Of
from ..selection import Selection
from ..summaries import Summaries
from . import empty_outputs, reference

_native: Any
try:
    from . import _native
except ImportError:  # built without a compiler: why_not() says so
    _native = None


def _share_torch_threads() -> None:
    """Lets our loops run on torch's OpenMP team (see native/pool.h), if its runtime has the GNU entry point."""
    # Where a runtime was preloaded (vLLM does that), torch runs on it too: the process's own symbol comes first.
    for library in (None, torch._C.__file__):
        try:
            entry = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError, TypeError):
            continue
        _native.share_team(ctypes.cast(entry, ctypes.c_void_p).value)
        return


if _native is not None:
    _share_torch_threads()

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# As in native/rank.h: kinds of summaries, and reductions by what is reduced and whether by its mean.
_MEAN, _BOX, _SHRUNK_BOX, _OUTLIERS = range(4)
_REDUCTIONS = {
    (Of.SCORES, False): 0, (Of.SCORES, True): 1, (Of.MASS, True): 2, (Of.MASS, False): 3, (Of.SOFTMAX, False): 4,
}  # fmt: skip
NO_PAGES = (0, 0, 0, 0)  # all keys lie in one piece
_MOST_DIM, _MOST_BLOCK = 1024, 1024  # of outliers, as in native/rank.h


def tiers() -> list[str]:
    """The instruction-set tiers this machine can run, best first; empty if the native module was not built."""
    return list(_native.tiers()) if _native else []


def tier() -> str:
    """The tier in use: the best one, or the one `CLOSECALL_ISA` names."""
    return tiers()[_tier()]


def _tier() -> int:
    wanted = os.environ.get("CLOSECALL_ISA")
    if not wanted:
        return 0
    here = tiers()
    if wanted not in here:
        raise unknown("CLOSECALL_ISA (this machine's tiers)", wanted, here)
    return here.index(wanted)


def peak(dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s that one core reaches from registers alone, with the tier in use and this type's products."""
    return float(_native.peak(_tier(), _DTYPES[dtype], seconds))


def why_not(q: Tensor) -> str | None:
    if _native is None:
        return "the native module was not built: install a C++ compiler and reinstall closecall"
    if q.device.type != "cpu":
        return f"the native backend runs on CPU tensors, not on {q.device.type}: use backend='auto'"
    if q.dtype not in _DTYPES:
        return f"no native kernel for {q.dtype}: use float32, bfloat16 or float16, or backend='reference'"
    return None


@functools.lru_cache(maxsize=64)
def _format(types: tuple[type, ...]) -> struct.Struct:
    return struct.Struct("=" + "".join("d" if t is float else "q" for t in types))


def _pack(fields: Iterable[int | float]) -> bytes:
    """One 64-bit field each, in the order of native/args.h."""
    listed = tuple(fields)
    return _format(tuple(map(type, listed))).pack(*listed)


def _view(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *x.stride())


def _tiles(g: Geometry) -> tuple[int, ...]:
    tables = (g.row, g.rows, g.key, g.pos, g.sequence)
    return (*(t.data_ptr() for t in tables), g.n_tiles, g.block, g.n_blocks)


def _shape(q: Tensor, k: Tensor, value_dim: int) -> tuple[int, ...]:
    return (q.shape[0], q.shape[1], k.shape[1], q.shape[3], value_dim, _DTYPES[q.dtype])


class Kernel(NamedTuple):
    """A scorer and a reduction as the numbers that the native code takes."""

    summary: int
    reduction: int
    shrink: float
    outliers: int


def kernel(policy: Policy, dim: int) -> Kernel | None:
    """The native kernel that ranks blocks by this policy; None where there is none."""
    planes = None if policy.scorer is None else policy.scorer.planes
    reduction = _REDUCTIONS.get((policy.reduction.of, policy.reduction.mean))
    if planes is None or reduction is None:
        return None
    shrink = float(planes.shrink or 0.0)
    if planes.outliers is None:
        summary = _MEAN if not planes.box else _BOX if planes.shrink is None else _SHRUNK_BOX
        return Kernel(summary, reduction, shrink, 0)
    # A row's best plane and the mean over rows cannot be taken one after the other.
    of_scores = policy.reduction.of is Of.SCORES and policy.reduction.mean
    if of_scores or policy.block > _MOST_BLOCK or dim > _MOST_DIM:
        return None
    return Kernel(_OUTLIERS, reduction, 1.0 if planes.box and planes.shrink is None else shrink, planes.outliers)


def ranked_together(policy: Policy, q: Tensor, k: Tensor) -> int:
    """How many consecutive query heads have one ranking."""
    return q.shape[1] // k.shape[1] if policy.share == "group" else 1


def pooling_args(policy: Policy, geometry: Geometry, every_row: int, together: int) -> tuple[int, ...]:
    """The fields of struct RankArgs that say by what tiles are scored, and who decides together."""
    again = policy.n_candidates(geometry.n_blocks)
    return (policy.pool, policy.outlying, policy.scored, every_row, together, again)


def kept_args(selection: Selection | None, q: Tensor, k: Tensor) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """The selection's fields of struct AttendArgs, and the tensors that they point to."""
    if selection is None:
        return (0,) * 9 + (1,), ()
    kv_idx, counts = selection.lists, selection.counts.to(torch.int32)
    kv_idx = kv_idx if kv_idx.stride(3) == 1 else kv_idx.contiguous()
    group = q.shape[1] // k.shape[1]
    sharing = group if selection.group % group == 0 else 1  # who shares across key heads shares within them
    lists = (kv_idx.data_ptr(), *kv_idx.stride()[:3], kv_idx.shape[3])
    return (*lists, counts.data_ptr(), *counts.stride(), sharing), (kv_idx, counts)


def rank(
    q: Tensor, k: Tensor, policy: Policy, geometry: Geometry, scale: float, summaries: Summaries | None = None
) -> Ranked:
    native = kernel(policy, q.shape[3])
    if native is None:
        return reference.rank(q, k, policy, geometry, scale)  # without native code it still works, slowly
    width = policy.rule.limit(geometry.n_blocks)
    together = ranked_together(policy, q, k)
    shape = (q.shape[0], q.shape[1] // together, geometry.n_tiles, width)
    full = geometry.exists.all()
    order = torch.empty(shape, dtype=torch.int32) if full else torch.full(shape, geometry.n_blocks, dtype=torch.int32)
    scores = torch.empty(shape) if full else torch.full(shape, -torch.inf)
    limits = policy.rule.limits(geometry.told, geometry.n_blocks)
    far = torch.empty(0, dtype=torch.int32) if limits is None else limits.to(torch.int32).contiguous()
    kinds = (native.summary, native.reduction, policy.sinks, width)
    every_row = policy.every_row(geometry)
    single = torch.empty(0, dtype=torch.uint8) if every_row is None else every_row.to(torch.uint8).contiguous()
    pooling = pooling_args(policy, geometry, single.data_ptr() if single.numel() else 0, together)
    chosen = _tier()

    def packed(masses: int, *kept: int) -> bytes:
        inputs = (*_view(q), *_view(k), *_shape(q, k, 0), *_tiles(geometry), *kinds)
        outputs = (order.data_ptr(), scores.data_ptr(), far.data_ptr() if far.numel() else 0, masses)
        numbers = (scale, torch.get_num_threads(), chosen)
        return _pack(
            (*inputs, *outputs, q.shape[2], native.shrink, native.outliers, *kept, *pooling, *numbers, *NO_PAGES)
        )

    kept, done = (0, 0, 0), 0
    if summaries is not None:  # before any work: it may refuse these keys
        kind = (native.summary, native.shrink, native.outliers, chosen)
        store, done = summaries.prepare(k, policy.block, kind, lambda: int(_native.summary_bytes(packed(0, *kept))))
        kept = (store.data_ptr(), store.shape[2], done)
    forced = _forced_mass(q, k, geometry, scale, policy.sinks) if policy.reduction.of is Of.MASS else None
    _native.rank(packed(0 if forced is None else forced.data_ptr(), *kept))
    if summaries is not None:
        summaries.finish(k.shape[2], done)
    return Ranked(order, scores, geometry.visible, geometry.forced(policy.sinks), geometry.sequence)


def _forced_mass(q: Tensor, k: Tensor, geometry: Geometry, scale: float, sinks: int) -> Tensor:
    def lse_of(kept: Selection) -> Tensor:
        return attend(q, k, k[..., :8], kept, geometry, scale)[1]  # with hardly any values

    return forced_mass(q.shape[1], geometry, sinks, lse_of)


def forced_mass(heads: int, geometry: Geometry, sinks: int, lse_of: Callable[[Selection], Tensor]) -> Tensor:
    """`[B, H, M]`: the log-sum-exp of every row over its forced blocks, where `lse_of` attends to those of a selection.

    A block whose mass is NaN counts for nothing, and the row's others still count.
    """
    counts = geometry.forced(sinks)[:, None]
    shape = (geometry.batch, 1, geometry.n_tiles)
    nothing = Ranked(torch.empty(*shape, 0, dtype=torch.int32), torch.empty(*shape, 0), counts, counts, counts)
    kv_idx = gather_kept(nothing, counts, geometry, sinks, max(1, int(counts.max())))

    def over(kv_idx: Tensor, counts: Tensor) -> Tensor:
        unknown = torch.empty(0)
        kept = Selection(kv_idx.expand(-1, heads, -1, -1), counts.expand(-1, heads, -1), unknown, unknown, geometry)
        return lse_of(kept)

    together = over(kv_idx, counts)
    if not bool(together.isnan().any()):
        return together
    alone = [over(kv_idx[..., i : i + 1], (counts > i).to(counts.dtype)) for i in range(kv_idx.shape[3])]
    each = torch.stack(alone)
    return each.masked_fill(each.isnan(), -torch.inf).logsumexp(0)


def gather_kept(ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
    batch, heads, n_tiles, order_width = ranked.order.shape
    kv_idx = torch.empty(batch, heads, n_tiles, width, dtype=torch.int32)
    counts = counts.to(torch.int64)
    inputs = (ranked.order.data_ptr(), counts.data_ptr(), *counts.stride(), kv_idx.data_ptr())
    _native.gather(_pack((*inputs, batch, heads, order_width, width, sinks, *_tiles(geometry))))
    return kv_idx


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    if geometry.whole:  # every row will be written
        out, lse = q.new_empty(batch, heads, rows, v.shape[3]), q.new_empty(batch, heads, rows, dtype=torch.float32)
    else:
        out, lse = empty_outputs(q, v)
    kept, alive = kept_args(selection, q, k)
    views = (*_view(q), *_view(k), *_view(v), *_view(out), lse.data_ptr(), rows)
    numbers = (scale, softcap, torch.get_num_threads(), _tier())
    _native.attend(_pack((*views, *_shape(q, k, v.shape[3]), *_tiles(geometry), *kept, *numbers, *NO_PAGES)))
    del alive
    return out, lse
