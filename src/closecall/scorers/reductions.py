"""Reductions: how a tile's row scores become one score per block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _largest(rows: Tensor) -> Tensor:
    best = rows.amax(-2)
    if not bool(best.isnan().any()):  # what follows is slow, and hardly ever needed
        return best
    return rows.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-2)


# Reductions of row scores [..., rows, blocks] to tile scores [..., blocks]. The paper's is the maximum: dropping a
# block that one row badly wants is worse than dropping one that many rows want a little. A row whose score is NaN
# has no say in a maximum; in a mean it cannot be left out.
AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {"max": _largest, "mean": lambda rows: rows.mean(-2)}


# Row-normalised reductions: every row's scores are turned into its estimated shares of softmax mass, in which the
# forced blocks' mass is exact, and the shares are reduced. A row that looks elsewhere then no longer shouts down one
# that knows what it wants. Tile scores are in [0, 1].
NORMALISED = {"mass": AGGREGATES["mean"], "mass-max": AGGREGATES["max"]}


# Like `mass-max`, of the scores alone: a row's softmax over all blocks it sees, forced ones judged by their summaries
# as the others are. Nothing but the ranking's own products goes into it. Tile scores are logs of shares, which cannot
# underflow.
SOFTMAX = "softmax"


def shares(logits: Tensor) -> Tensor:
    """Softmax over the last axis, in which NaN counts as -inf; a row of nothing else gets zeros."""
    found = logits.softmax(-1)
    if not bool(found.sum().isnan()):
        return found
    top = torch.finfo(logits.dtype).max  # infinities share what there is
    return logits.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf).softmax(-1).nan_to_num(nan=0.0)


def log_shares(logits: Tensor) -> Tensor:
    """Log softmax over the last axis, in which NaN counts as -inf; a row of nothing else gets -inf."""
    top = torch.finfo(logits.dtype).max
    known = logits.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)
    total = known.logsumexp(-1, keepdim=True)
    return torch.where(total == -torch.inf, -torch.inf, known - total)
