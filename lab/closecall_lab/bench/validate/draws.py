"""What is timed: normal numbers, whose kept blocks lie anywhere, and keys in clusters, whose kept blocks lie together.

Neighbouring tiles that keep the same blocks find them in the cache, so a time on one kind says little about the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from closecall.info import DTYPES

from ...spine import inputs

GAUSSIAN, CLUSTERED = "gaussian", "clustered"
KINDS = (GAUSSIAN, CLUSTERED)
TOPICS = 16
RUN = 512  # tokens on one topic
LEAN = 3.0  # how far towards its topic a token leans, in standard deviations of what it has of its own


def tensors(kind: str, heads: int, kv_heads: int, n: int, dim: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one sequence, on the CPU: every device gets the same."""
    q, k, v = inputs.qkv(heads, kv_heads, n, n, dim, dtype)
    if kind == CLUSTERED:
        generator = torch.Generator().manual_seed(inputs.SEED + 1)
        directions = torch.randn(TOPICS, dim, generator=generator)
        topic = torch.randint(TOPICS, (-(-n // RUN),), generator=generator).repeat_interleave(RUN)[:n]
        shift = (LEAN * torch.nn.functional.normalize(directions, dim=1))[topic].to(DTYPES[dtype])
        q.add_(shift)
        k.add_(shift)
    return q, k, v


def together(kv_idx: Tensor, counts: Tensor) -> float:
    """The share of kept blocks whose neighbour above is kept too."""
    last = torch.arange(kv_idx.shape[-1] - 1) < counts[..., None] - 1
    pairs = int(last.sum())
    return float(((kv_idx[..., 1:] - kv_idx[..., :-1] == 1) & last).sum()) / pairs if pairs else 0.0
