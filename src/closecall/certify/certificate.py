"""Certificates: per row, how much softmax mass a selection can have dropped at most, and what that can have cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..api import attend
from ..block_mass import (
    Arithmetic,
    Keys,
    Values,
    distance_above,
    longest_so_far,
    norms,
    share_above,
    summarise_keys,
    summarise_values,
    up,
    weight_above,
)
from ..checks import check_scale, check_tiles, is_number
from ..geometry import Geometry
from ..selection import Selection

# (row, block) pairs that are looked at together, if one row of each head has no more: 1 MiB in float64.
AT_ONCE = 2**17


@dataclass(frozen=True, eq=False)
class Certificate:
    """Guaranteed upper bounds for every row of a selection, float32 `[B, H, M]`.

    mass:  on the softmax mass of the keys the row sees and the selection dropped. Exactly 0 where it dropped none of
           them, and for padded rows; 1 where nothing is known.
    error: on the 2-norm of the difference between attention over the kept blocks and dense attention. Infinite where
           nothing is known: a NaN or an infinity in a block that the row sees.
    real:  bool `[B, M]`, the rows that are not padding. The aggregates are over these rows, for all heads.
    """

    mass: Tensor
    error: Tensor
    real: Tensor

    def _over_real(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)[self.real]

    @property
    def max_mass(self) -> float:
        return _max(self._over_real(self.mass))

    @property
    def mean_mass(self) -> float:
        return _mean(self._over_real(self.mass))

    @property
    def max_error(self) -> float:
        return _max(self._over_real(self.error))

    @property
    def mean_error(self) -> float:
        return _mean(self._over_real(self.error))

    def certified(self, eps: float) -> float:
        """The share of (row, head) pairs that provably lost at most `eps` of their softmax mass; NaN of none."""
        if not is_number(eps) or not 0 <= eps <= 1:
            raise ValueError(f"eps must be in [0, 1], a share of the softmax mass, got {eps!r}")
        return _mean((self._over_real(self.mass) <= eps).double())

    def __str__(self) -> str:
        shares = ", ".join(f"{self.certified(eps):.1%} at {eps:g}" for eps in (0.5, 0.1, 0.01))
        return (
            f"Certificate: dropped mass at most {self.mean_mass:.3g} on average, {self.max_mass:.3g} at worst; "
            f"output error at most {self.mean_error:.3g} and {self.max_error:.3g}; rows certified: {shares}"
        )


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else float("nan")


def _mean(x: Tensor) -> float:
    return float(x.double().mean())  # NaN of nothing


def rows_seen(geometry: Geometry, b: int, t: int, keys: Keys, some: slice = slice(None)) -> Tensor:
    """float64 `[rows, n_blocks]`: how many keys of each visible block each row of a tile, or some of them, sees."""
    rows, visible = int(geometry.rows[b, t]), int(geometry.visible[b, t])
    device = keys.size.device
    position = int(geometry.pos[b, t]) + torch.arange(rows, device=device)[some]
    start = torch.arange(visible, device=device) * geometry.block
    return (position[:, None] + 1 - start).clamp(min=0).double().minimum(keys.size[:visible])


def _certify_rows(
    q: Tensor, out: Tensor, lse: Tensor, kept: Tensor, seen: Tensor, keys: Keys, values: Values, longest: Tensor,
    scale: float, arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mass and error `[R]` of float64 rows; `kept`, `seen`: `[R, n_blocks]`, `keys` and `values` the same blocks,
    `longest` the norms that no key and no value these rows see exceeds."""
    within = (scale * norms(q) * longest[0], keys.block * kept.shape[1], kept.sum(1))
    known = lse.isfinite() | (lse == -torch.inf)
    least_kept = lse.where(known, torch.nan) - arithmetic.lse_error(*within, lse)

    above = weight_above(q, keys, scale, seen, arithmetic.softcap).masked_fill(kept, -torch.inf)
    mass = share_above(above.logsumexp(1), least_kept, above.shape[1])

    # kept - dense = sum over dropped j of p_j (kept - v_j). The dropped blocks' probabilities sum to the mass, and
    # each alone is largest where the others weigh nothing.
    rounding = arithmetic.out_error(*within, out, longest[1])
    dropped = ~kept & (seen > 0)
    distance = (distance_above(out, values) + rounding[:, None]).masked_fill(~dropped, 0.0)
    each = share_above(above, least_kept[:, None], 1).double()
    error = (each * distance).sum(1).minimum(mass.double() * distance.amax(1))
    error = up(error)  # far more than the roundings of the sum
    some = dropped.any(1)
    return mass.nan_to_num(nan=1.0).where(some, 0.0), error.nan_to_num(nan=torch.inf, posinf=torch.inf).where(some, 0.0)


def _spread(tiles: slice, most: int | None) -> list[int]:
    """At most so many of the tiles, evenly spread, the last one among them; all of them for None."""
    every = list(range(tiles.start, tiles.stop))
    if most is None or len(every) <= most:
        return every
    return [every[len(every) * (i + 1) // most - 1] for i in range(most)]


@torch.no_grad()
def certify(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, backend: str = "auto",
    softcap: float = 0.0, tiles: int | None = None,
) -> Certificate:  # fmt: skip
    """For every row, upper bounds on the softmax mass the selection dropped and on the error of its output.

    Arguments are as for `attend`. The bounds hold for the exact numbers, rounding included. The weight of kept blocks
    comes from the backend's attention, less its error bound; the most that dropped blocks can weigh comes from their
    summaries (see `closecall.block_mass`), not from their keys one by one. `error` is about the selection; rounding the
    output to its type is not part of it.

    With `tiles`, only that many tiles of each sequence are certified, evenly spread, the last one included. `real` is
    then True for their rows alone; the bounds of other rows are 0 and mean nothing.

    Works on one key head and some rows of a tile at a time, in float64: beside the output and the result it holds the
    summaries of one key head (24 D + 8 Dv bytes a block, and 16 bytes a key) and some arrays of 1 MiB.

    >>> import torch, closecall
    >>> q, k, v = (torch.randn(1, 2, 512, 64) for _ in range(3))
    >>> selection = closecall.select(q, k, "dense")
    >>> closecall.certify(q, k, v, selection).max_mass
    0.0
    """
    check_tiles(tiles)
    out, lse = attend(q, k, v, selection, scale=scale, backend=backend, softcap=softcap, return_lse=True)
    scale = check_scale(scale, q.shape[-1])
    g = selection.geometry
    group = q.shape[1] // k.shape[1]
    arithmetic = Arithmetic(q.dtype, q.shape[-1], softcap)
    mass, error = (torch.zeros(lse.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    real = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    full = (selection.counts == g.visible.to(q.device)[:, None]).all(1).tolist()
    for b, there, _, span in g.spans():
        chosen = _spread(there, tiles)
        for t in chosen:
            real[b, int(g.row[b, t]) : int(g.row[b, t]) + int(g.rows[b, t])] = True
        cut = [t for t in chosen if not full[b][t]]
        for shared in range(k.shape[1] if cut else 0):
            keys = summarise_keys(k[b, shared, span], g.block)
            values = summarise_values(v[b, shared, span], g.block)
            so_far = [longest_so_far(x[b, shared, span]) for x in (k, v)]
            heads = slice(shared * group, (shared + 1) * group)
            for t in cut:
                first, n, visible = int(g.row[b, t]), int(g.rows[b, t]), int(g.visible[b, t])
                held = selection.kept_mask((b, heads, t))[:, :visible]
                blocks = (keys.part(0, visible), values.part(0, visible))
                step = max(1, AT_ONCE // (group * visible))
                for i in range(0, n, step):
                    rows = min(step, n - i)
                    where = (b, heads, slice(first + i, first + i + rows))
                    seen = rows_seen(g, b, t, keys, slice(i, i + rows)).repeat(group, 1)
                    bounds = _certify_rows(
                        q[where].flatten(0, 1).double(), out[where].flatten(0, 1).double(),
                        lse[where].flatten().double(), held.repeat_interleave(rows, 0), seen, *blocks,
                        torch.stack([x[int(g.end[b, t]) - 1] for x in so_far]), scale, arithmetic,
                    )  # fmt: skip
                    mass[where], error[where] = (x.view(group, rows) for x in bounds)
    return Certificate(mass, error, real)
