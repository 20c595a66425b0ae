"""What benchmarks time on: tensors of standard normal numbers, torch's own attention at its best, and work counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from closecall.geometry import Geometry
from closecall.info import DTYPES
from closecall.selection import Selection

SEED = 0
PROBE_KEYS = 2048  # SDPA's faster form is found on the first keys only: at full length a trial can take minutes


def qkv(heads: int, kv_heads: int, rows: int, keys: int, dim: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    shapes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(1, h, n, dim, generator=generator).to(DTYPES[dtype]) for h, n in shapes)
    return q, k, v


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, grouped: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error rather than a fall back to the slow kernel
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def _sdpa_forms(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """The ways to give SDPA grouped heads without copying keys in the timed call."""
    group = q.shape[1] // k.shape[1]
    forms = {"enable_gqa": lambda: _flash(q, k, v, causal and q.shape[2] > 1, True)}
    if q.shape[2] == 1:  # one row: the heads of a group can be the rows of one head
        rows = q.view(q.shape[0], k.shape[1], group, q.shape[3])
        forms["group as rows"] = lambda: _flash(rows, k, v, False, False)
    elif k.shape[1] == 1:
        wide_k, wide_v = (x.expand(-1, group, -1, -1) for x in (k, v))
        forms["expanded views"] = lambda: _flash(q, wide_k, wide_v, causal, False)
    return forms


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> tuple[str, Callable[[], Tensor]]:
    """torch's flash kernel on these tensors, in the form that is faster here; causal over whole prompts, or not."""
    rows = q.shape[2] if q.shape[2] == 1 else PROBE_KEYS
    trial = _sdpa_forms(q[:, :, :rows], k[:, :, :PROBE_KEYS], v[:, :, :PROBE_KEYS], causal)
    taken: dict[str, list[float]] = {name: [] for name in trial}
    for _ in range(7):
        for name, call in trial.items():
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
    best = min(taken, key=lambda name: statistics.median(taken[name]))
    return best, _sdpa_forms(q, k, v, causal)[best]


def flops(selection: Selection | None, geometry: Geometry, heads: int, dim: int, value_dim: int) -> int:
    """Counts the operations of both products, over the rows of each tile and the keys it sees of its kept blocks."""
    rows, end = geometry.rows, geometry.end
    if selection is None:
        pairs = int((rows * end).sum()) * heads
    else:
        keys = (end[:, None, :, None] - selection.lists.long() * geometry.block).clamp(0, geometry.block)
        kept = torch.arange(keys.shape[-1]) < selection.counts[..., None]
        listed = torch.where(selection.unlisted, end[:, None], keys.where(kept, 0).sum(-1))
        pairs = int((listed * rows[:, None]).sum())
    return 2 * (dim + value_dim) * pairs
