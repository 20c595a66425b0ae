"""What a tile really loses: the softmax mass of every block for every row of it, key by key, one tile at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def row_shares(
    q: Tensor, k: Tensor, rows: slice, end: int, *, block: int, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """float32 `[H, rows, blocks]`, the share of its softmax mass that each row has in each block, and `[H, rows]`, the
    logarithm of the row's whole weight.

    `q [H, M, D]`, `k [Hkv, N, D]`; the rows are those at key positions `end - len(rows)` to `end`. One key head at a
    time: beside the result, (H / Hkv) * rows * end numbers.
    """
    group, n = q.shape[0] // k.shape[0], rows.stop - rows.start
    sees = torch.arange(end, device=q.device) <= torch.arange(end - n, end, device=q.device)[:, None]
    shares, weights = [], []
    for shared, keys in enumerate(k[:, :end].float()):
        logits = scale * (q[shared * group : (shared + 1) * group, rows].float() @ keys.mT)
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        logits = logits.masked_fill(~sees, -torch.inf)
        weight = logits.logsumexp(-1, keepdim=True)
        mass = torch.nn.functional.pad((logits - weight).exp(), (0, -end % block))
        shares.append(torch.unflatten(mass, -1, (-1, block)).sum(-1))
        weights.append(weight[..., 0])
    return torch.cat(shares), torch.cat(weights)
