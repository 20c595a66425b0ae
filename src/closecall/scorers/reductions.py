"""Reductions: how a tile's row scores become one score per block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Of(Enum):
    """What a row brings to the reduction."""

    SCORES = "scores"  # as they are
    # Its estimated shares of softmax mass, in which the forced blocks' mass is exact. A row that looks elsewhere then
    # no longer shouts down one that knows what it wants. Tile scores are in [0, 1].
    MASS = "mass"
    # The logs of its shares in a softmax over the scores of all blocks it sees, forced ones judged by their summaries
    # as the others are: nothing but the ranking's own products. Logs cannot underflow.
    SOFTMAX = "softmax"


@dataclass(frozen=True)
class Reduction:
    """Takes the mean or the largest over a tile's rows, of what `of` says.

    The paper's is the largest score: dropping a block that one row badly wants is worse than dropping one that many
    rows want a little.
    """

    of: Of
    mean: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """Tile scores `[..., blocks]` of rows `[..., rows, blocks]`.

        A row whose score is NaN has no say in a maximum; in a mean it cannot be left out.
        """
        # Of rows side by side: down columns torch adds up those that are left over from its vectors in another order.
        return rows.mT.contiguous().mean(-1) if self.mean else _largest(rows)


REDUCTIONS = {
    "max": Reduction(Of.SCORES, mean=False),
    "mean": Reduction(Of.SCORES, mean=True),
    "mass": Reduction(Of.MASS, mean=True),
    "mass-max": Reduction(Of.MASS, mean=False),
    "softmax": Reduction(Of.SOFTMAX, mean=False),
}


def _largest(rows: Tensor) -> Tensor:
    best = rows.amax(-2)
    if not bool(best.isnan().any()):  # what follows is slow, and hardly ever needed
        return best
    return rows.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-2)


def shares(logits: Tensor) -> Tensor:
    """Softmax over the last axis, in which NaN counts as -inf; a row of nothing else gets zeros."""
    shared = logits.softmax(-1)
    if not bool(shared.sum().isnan()):
        return shared
    top = torch.finfo(logits.dtype).max  # infinities share what there is
    return logits.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf).softmax(-1).nan_to_num(nan=0.0)


def log_shares(logits: Tensor) -> Tensor:
    """Log softmax over the last axis, in which NaN counts as -inf; a row of nothing else gets -inf."""
    top = torch.finfo(logits.dtype).max
    known = logits.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)
    total = known.logsumexp(-1, keepdim=True)
    return torch.where(total == -torch.inf, -torch.inf, known - total)
