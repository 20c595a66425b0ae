"""Numbers in few bits: what the page stores, and how it is read back (by `template/data.js`).

A map has one cell for every block a tile sees, tile after tile: what a tile cannot see takes no room.

kept:  one bit a cell.
score: 8 bits. A score's place on the tile's own scale, where the first dropped block is 0 and the best block 1, so that
       the last kept block stands at the margin. 0 means not ranked (forced), 1 to 255 the place from -1 to 1 (what is
       lower counts as -1), as the square root of its size: fine near the cut, coarse far from it.
mass:  8 bits. 0 means less than FLOOR; 1 to 255 go from FLOOR to 1 in equal ratios of 4.6%.
share: 16 bits. 0 to 65534 go from 0 to 1 in equal steps; 65535 is NaN.
"""

from __future__ import annotations

import base64
import zlib
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FLOOR = 1e-5
NAN = 65535

Scalar = TypeVar("Scalar", bound=np.generic)
Floats = NDArray[np.floating]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]


def score_codes(place: Floats, kept: Bools | None = None) -> Bytes:
    """NaN is not ranked. With `kept`, rounding never takes a block over the cut: kept ones stay above 0."""
    near = np.clip(np.nan_to_num(place, nan=0.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)
    codes = 128 + np.round(127 * np.sign(near) * np.sqrt(np.abs(near)))
    if kept is not None:
        codes = np.where(kept, np.maximum(codes, 129), np.minimum(codes, 128))
    return np.where(np.isnan(place), 0, codes).astype(np.uint8)


def mass_codes(mass: Floats) -> Bytes:
    there = np.clip(np.nan_to_num(mass, nan=0.0), 0.0, 1.0)
    codes = 255 - np.round(254 * np.log(np.maximum(there, FLOOR)) / np.log(FLOOR))
    return np.where(there < FLOOR, 0, codes).astype(np.uint8)


def share_codes(share: Floats) -> NDArray[np.uint16]:
    codes = np.round(np.clip(np.nan_to_num(share, nan=0.0), 0.0, 1.0) * (NAN - 1))
    return np.where(np.isnan(share), NAN, codes).astype("<u2")


def linear_codes(share: Floats) -> Bytes:
    """8 bits in equal steps, for shares of heads or cells."""
    return np.round(255 * np.clip(share, 0.0, 1.0)).astype(np.uint8)


def packed(values: NDArray[np.generic]) -> str:
    """Deflated, as text without any character that HTML or JavaScript could read as its own."""
    squeezed = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(squeezed.compress(np.ascontiguousarray(values).tobytes()) + squeezed.flush()).decode()


def kept_bits(kept: Bools) -> Bytes:
    """`[heads, cells]`: each head begins a byte, the first cell is its lowest bit."""
    return np.packbits(kept, axis=-1, bitorder="little")


class Cells:
    """Which cells a map has, `[T, N]`, and the coarser map of `pool` x `pool` cells."""

    def __init__(self, visible: NDArray[np.int64], n_blocks: int, pool: int) -> None:
        self.seen: Bools = np.arange(n_blocks) < visible[:, None]
        self.pool = pool
        counts = self._sums(self.seen.astype(np.float64))
        self.coarse_seen: Bools = counts > 0
        self._counts = np.maximum(counts, 1)

    def _sums(self, x: Floats) -> Floats:
        tiles, blocks = (-(-n // self.pool) for n in x.shape[-2:])
        room = [(0, 0)] * (x.ndim - 2) + [(0, tiles * self.pool - x.shape[-2]), (0, blocks * self.pool - x.shape[-1])]
        split = np.pad(x, room).reshape(*x.shape[:-2], tiles, self.pool, blocks, self.pool)
        summed: Floats = split.sum((-3, -1))
        return summed

    def flat(self, x: NDArray[Scalar]) -> NDArray[Scalar]:
        """`[..., cells]` from `[..., T, N]`."""
        return x[..., self.seen]

    def coarse(self, x: Floats) -> Floats:
        """The mean over the seen cells of each pool, `[..., coarse cells]` from `[..., T, N]`."""
        means: Floats = self._sums(np.where(self.seen, x, 0.0)) / self._counts
        return means[..., self.coarse_seen]
