"""Where each tile's rows and keys lie: one plan for whole, chunked, padded and packed calls.

A *sequence* is a run of real keys in one batch row of the buffer, with the queries of its last positions. Its block
grid starts at its first real key and its tile grid at its first real query row, so padding and neighbours change
nothing.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Geometry:
    """The tiles of one call. All tensors are int64 `[B, T]`; a tile with `rows == 0` does not exist."""

    q_len: int  # M and N of the buffers this plan was made for
    k_len: int
    block: int
    tile: int
    n_blocks: int  # of the longest sequence; also the sentinel in kv_idx
    row: Tensor  # first query row in the buffer
    rows: Tensor  # number of real query rows
    key: Tensor  # first real key of the tile's sequence in the buffer
    pos: Tensor  # position of the tile's first row among the sequence's keys
    sequence: Tensor  # id of the tile's sequence, unique over the whole batch
    whole: bool  # one sequence per batch row that fills the buffer
    after: Tensor | None = None  # how many tiles of its prompt follow each, now or in later calls; None: not said
    asking: Tensor | None = None  # `sequence` where a rule protects a tile as one of its prompt's last, else -1

    @property
    def batch(self) -> int:
        return self.row.shape[0]

    @property
    def n_tiles(self) -> int:
        return self.row.shape[1]

    @property
    def exists(self) -> Tensor:
        return self.rows > 0

    @functools.cached_property
    def end(self) -> Tensor:
        """One past the position of the tile's last row: how many keys the tile may see at all."""
        return self.pos + self.rows

    @functools.cached_property
    def visible(self) -> Tensor:
        """Number of blocks that start at or before the tile's last row."""
        return torch.where(self.exists, (self.end + self.block - 1) // self.block, 0)

    @property
    def told(self) -> Tensor:
        """The sequences that a rule which protects last tiles is told of: `asking`, or all of them."""
        return self.sequence if self.asking is None else self.asking

    @functools.cached_property
    def from_end(self) -> Tensor:
        """How many tiles of its sequence follow each tile in this call."""
        return from_end(self.sequence)

    def among_last(self, tiles: int) -> Tensor:
        """bool `[B, T]`: the last so many tiles of their prompts, each of which ends with the call unless it is said to
        go on (`after`)."""
        return self.exists & ((self.from_end if self.after is None else self.after) < tiles)

    @functools.cached_property
    def _forced(self) -> dict[int, Tensor]:
        """Results of `forced` by `sinks`, kept because every layer of a model asks again."""
        return {}

    @functools.cached_property
    def problem(self) -> str | None:
        """What could make a kernel read outside tensors of this plan's lengths; None for every plan made by `plan`."""
        tables = (self.row, self.rows, self.key, self.pos, self.sequence)
        for t in tables:
            if t.dtype != torch.int64 or t.ndim != 2 or t.shape != self.row.shape or not t.is_contiguous() or t.is_meta:
                return f"its tables must be contiguous int64 [B, T], got {t.dtype} {list(t.shape)}"
        if min(self.block, self.tile) < 1 or any(bool((t < 0).any()) for t in tables[:4]):
            return "it holds a negative number"
        if bool((self.rows > self.tile).any()) or bool((self.row > self.q_len - self.rows).any()):
            return f"a tile leaves the {self.q_len} query rows or is longer than {self.tile}"
        if bool((self.key + self.pos.clamp(max=self.k_len) > self.k_len - self.rows).any()):
            return f"a tile sees keys beyond the {self.k_len} there are"
        if bool((self.visible > self.n_blocks).any()):
            return f"a tile sees more than the {self.n_blocks} blocks"
        return None

    def first_own(self) -> Tensor:
        """The first block that overlaps the tile's own rows."""
        return torch.where(self.exists, self.pos // self.block, 0)

    def forced(self, sinks: int) -> Tensor:
        """Number of forced blocks: the first `sinks` ones and every block overlapping the tile's own rows."""
        if sinks not in self._forced:
            own = self.first_own()
            self._forced[sinks] = self.visible - own + own.clamp(max=sinks)
        return self._forced[sinks]

    def forced_mask(self, sinks: int) -> Tensor:
        """bool `[B, T, n_blocks]`: the forced blocks."""
        block = torch.arange(self.n_blocks, device=self.row.device)
        sink_or_own = (block < sinks) | (block >= self.first_own()[..., None])
        return sink_or_own & (block < self.visible[..., None])

    def tiles(self) -> list[tuple[int, int, slice, slice, int]]:
        """(batch row, tile, its query rows, the keys it may see, position of its first row) of every real tile."""
        listed = zip(*(x.tolist() for x in (self.row, self.rows, self.key, self.pos)), strict=True)
        return [
            (b, t, slice(row, row + rows), slice(key, key + pos + rows), pos)
            for b, per_batch in enumerate(listed)
            for t, (row, rows, key, pos) in enumerate(zip(*per_batch, strict=True))
            if rows
        ]

    def spans(self) -> list[tuple[int, slice, slice, slice]]:
        """(batch row, tiles, query rows, keys) of every sequence that has queries."""
        by_sequence: dict[int, list[tuple[int, int, slice, slice]]] = {}
        ids = self.sequence.tolist()
        for b, t, rows, keys, _ in self.tiles():
            by_sequence.setdefault(ids[b][t], []).append((b, t, rows, keys))
        return [
            (ts[0][0], slice(ts[0][1], ts[-1][1] + 1), slice(ts[0][2].start, ts[-1][2].stop), ts[-1][3])
            for ts in by_sequence.values()
        ]


def from_end(sequence: Tensor) -> Tensor:
    """int64 `[B, T]`: how many tiles of the same sequence follow each tile."""
    tile = torch.arange(sequence.shape[1], device=sequence.device).expand_as(sequence)
    ends = torch.ones_like(sequence, dtype=torch.bool)
    ends[:, :-1] = sequence[:, :-1] != sequence[:, 1:]
    last = torch.where(ends, tile, sequence.shape[1]).flip(1).cummin(1).values.flip(1)
    return last - tile


Spans = tuple[tuple[tuple[int, int, int, int], ...], ...]


@functools.lru_cache(maxsize=256)
def _build(q_len: int, k_len: int, block: int, tile: int, spans: Spans) -> Geometry:
    """Builds the geometry from the sequences of each batch row, as (first row, rows, first key, keys).

    Every layer of a model asks for the same plan, padded and packed ones too, and backends keep what they make of it.
    """
    tiles = []
    number = 0
    for sequences in spans:
        of_row = []
        for row, rows, key, keys in sequences:
            starts = range(0, rows, tile)
            of_row += [(row + at, min(tile, rows - at), key, keys - rows + at, number) for at in starts]
            number += 1
        tiles.append(of_row)
    width = max(1, max(map(len, tiles)))
    padded = [of_row + [(0, 0, 0, 0, -1)] * (width - len(of_row)) for of_row in tiles]
    table = torch.tensor(padded, dtype=torch.int64)  # [B, T, 5]
    longest = max((keys for sequences in spans for _, _, _, keys in sequences), default=1)
    row_, rows_, key_, pos_, sequence_ = (c.contiguous() for c in table.unbind(-1))
    return Geometry(
        q_len, k_len, block, tile, -(-longest // block), row_, rows_, key_, pos_, sequence_,
        whole=all(s == ((0, q_len, 0, k_len),) for s in spans),
    )  # fmt: skip


def _whole(batch: int, q_len: int, k_len: int, block: int, tile: int) -> Geometry:
    return _build(q_len, k_len, block, tile, (((0, q_len, 0, k_len),),) * batch)


def _from_padding(q_len: int, block: int, tile: int, key_padding: Tensor) -> Geometry:
    mask = key_padding.cpu()
    k_len = mask.shape[1]
    first = mask.int().argmax(1)
    count = mask.sum(1)
    holes = (mask.int().diff(dim=1) == 1).sum(1) + mask[:, 0].int() > 1
    if bool(holes.any()):
        at = int(holes.nonzero()[0])
        raise ValueError(
            f"key_padding[{at}] has padding between real keys: real keys must be one run per sequence "
            "(pad on the left or on the right, or pack with cu_seqlens)"
        )
    runs = [[(start, keys)] if keys else [] for start, keys in zip(first.tolist(), count.tolist(), strict=True)]
    return _from_runs(q_len, k_len, block, tile, runs)


def _from_runs(q_len: int, k_len: int, block: int, tile: int, runs: list[list[tuple[int, int]]]) -> Geometry:
    """Builds the geometry from the sequences of each batch row, as (first key, keys) in the buffer.

    Rows align to the end of the *buffer*: row i sits at key N - M + i, so a real row's own key is real too.
    """
    offset = k_len - q_len
    spans = []
    for sequences in runs:
        rows = [(max(0, start - offset), min(q_len, start + keys - offset)) for start, keys in sequences]
        paired = zip(rows, sequences, strict=True)
        spans.append(
            tuple(
                (low, high - low, start, low + offset - start + high - low)
                for (low, high), (start, _) in paired
                if high > low
            )
        )
    return _build(q_len, k_len, block, tile, tuple(spans))


def from_segments(q_len: int, block: int, tile: int, segments: Tensor) -> Geometry:
    """From the sequence every key belongs to: int `[B, N]`, 0 for padding, equal numbers for neighbours that belong
    together. What `key_padding` and `cu_seqlens` can say, and both at once."""
    batch, k_len = segments.shape
    ids = segments.cpu()
    if bool((ids == 1).all()):
        return _whole(batch, q_len, k_len, block, tile)
    runs: list[list[tuple[int, int]]] = []
    for row in ids:
        values, counts = torch.unique_consecutive(row, return_counts=True)
        starts = counts.cumsum(0) - counts
        listed = zip(values.tolist(), starts.tolist(), counts.tolist(), strict=True)
        runs.append([(start, keys) for value, start, keys in listed if value])
    return _from_runs(q_len, k_len, block, tile, runs)


def _from_packed(length: int, block: int, tile: int, cu_seqlens: Tensor) -> Geometry:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to the packed length {length}, got {bounds}")
    spans = tuple((a, b - a, a, b - a) for a, b in itertools.pairwise(bounds) if b > a)
    return _build(length, length, block, tile, (spans,))


def plan(
    batch: int,
    q_len: int,
    k_len: int,
    block: int,
    tile: int,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Geometry:
    """The geometry of a call with `q [batch, H, q_len, D]` and `k [batch, Hkv, k_len, D]`."""
    if key_padding is not None and cu_seqlens is not None:
        raise ValueError("key_padding and cu_seqlens exclude each other: packed sequences have no padding")
    tensors: dict[str, object] = {"key_padding": key_padding, "cu_seqlens": cu_seqlens}
    for name, x in tensors.items():
        if x is not None and not isinstance(x, Tensor):
            what = f"bool [B, N] = {[batch, k_len]}" if name == "key_padding" else "int32 or int64, 1-D"
            raise TypeError(f"{name} must be a torch.Tensor ({what}), got {type(x).__name__}")
    if key_padding is not None:
        if key_padding.dtype != torch.bool or tuple(key_padding.shape) != (batch, k_len):
            raise ValueError(
                f"key_padding must be bool [B, N] = {[batch, k_len]} with True for real keys, "
                f"got {key_padding.dtype} {list(key_padding.shape)}"
            )
        return _from_padding(q_len, block, tile, key_padding)
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens must be a 1-D int32 or int64 tensor of at least two offsets, "
                f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        if batch != 1 or q_len != k_len:
            raise ValueError(
                f"cu_seqlens packs whole sequences into one batch row: needs B = 1 and M = N, "
                f"got B = {batch}, M = {q_len}, N = {k_len}"
            )
        return _from_packed(k_len, block, tile, cu_seqlens)
    return _whole(batch, q_len, k_len, block, tile)
