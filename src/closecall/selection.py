"""Selections: which blocks each tile keeps, how sure it was, and what that came to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .checks import is_whole
from .geometry import Geometry, plan
from .ranking import Decision, Ranked


@dataclass(frozen=True, eq=False)
class Selection:
    """The kept blocks of every (sequence, head, tile).

    kv_idx:    int32 `[B, H, T, width]`, block indices ascending, then the sentinel `n_blocks`.
    counts:    int32 `[B, H, T]`, how many blocks are kept; 0 for a tile that does not exist.
    margin:    float32 `[B, H, T]`, how decisive the cut was (Eq. 4); NaN where nothing was cut.
    triggered: bool `[B, H, T]`, the tiles the rule expanded.
    group:     how many consecutive heads, from the first on, keep the same blocks because they decided together
               (`share="group"`); 1 where each decided for itself. Kernels read what they share once.
    lists:     what kernels read: kv_idx, but as wide as the tiles that choose need it. A tile that keeps every block it
               sees may have a larger count (`unlisted`): one such tile would widen the lists of all others.

    With `cu_seqlens` the tiles of all packed sequences follow each other along T. Block indices always count from the
    first real key of the tile's own sequence.
    """

    lists: Tensor
    counts: Tensor
    margin: Tensor
    triggered: Tensor
    geometry: Geometry
    group: int = 1
    _made: tuple[int, int] | None = field(default=None, init=False, repr=False)

    @classmethod
    def made(cls, **fields: Any) -> Selection:
        """Makes a selection that is known to be right, as long as nobody writes into its tensors."""
        selection = cls(**fields)
        object.__setattr__(selection, "_made", selection._versions())
        return selection

    @classmethod
    def of_groups(cls, lists: Tensor, decision: Decision, geometry: Geometry, heads: int) -> Selection:
        """The selection of `heads` query heads from what was decided for all heads that share a decision."""
        group = heads // lists.shape[1]
        return cls.made(
            lists=each_head(lists, group),
            counts=each_head(decision.counts.to(torch.int32), group).contiguous(),
            margin=each_head(decision.margin, group),
            triggered=each_head(decision.triggered, group),
            geometry=geometry,
            group=group,
        )

    def _versions(self) -> tuple[int, int] | None:
        """How often lists and counts have been written to; None where torch does not count (inference mode)."""
        if self.lists.is_inference() or self.counts.is_inference():
            return None
        return self.lists._version, self.counts._version

    @property
    def untouched(self) -> bool:
        """Whether nobody wrote into its tensors since `select` made it. Needs no device synchronisation."""
        return self._made is not None and self._made == self._versions()

    @classmethod
    def from_blocks(
        cls,
        kv_idx: Tensor,
        counts: Tensor,
        *,
        q_len: int,
        k_len: int,
        block: int = 64,
        tile: int = 64,
        key_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Selection:
        """A hand-made selection. `attend` checks it against the tensors it is used with."""
        for name, x in (("kv_idx", kv_idx), ("counts", counts)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor of whole numbers, got {type(x).__name__}")
        if kv_idx.ndim != 4 or counts.ndim != 3:
            raise ValueError(
                f"a selection's kv_idx must be [B, H, T, width] and its counts [B, H, T], got {list(kv_idx.shape)} and "
                f"{list(counts.shape)}"
            )
        for name, size in (("q_len", q_len), ("k_len", k_len), ("block", block), ("tile", tile)):
            if not is_whole(size) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        margin = torch.full(counts.shape, torch.nan, device=counts.device)
        triggered = torch.zeros(counts.shape, dtype=torch.bool, device=counts.device)
        geometry = plan(kv_idx.shape[0], q_len, k_len, block, tile, key_padding, cu_seqlens)
        return cls(kv_idx, counts, margin, triggered, geometry)

    @property
    def block(self) -> int:
        return self.geometry.block

    @property
    def tile(self) -> int:
        return self.geometry.tile

    @property
    def n_blocks(self) -> int:
        return self.geometry.n_blocks

    @property
    def kept_fraction(self) -> float:
        """Kept blocks over visible blocks, over all tiles and heads."""
        visible = int(self.geometry.visible.sum()) * self.counts.shape[1]
        return int(self.counts.sum()) / visible if visible else float("nan")

    @property
    def effective_budget(self) -> float:
        """Mean kept blocks per tile, forced ones included (the paper's column)."""
        tiles = int(self.geometry.exists.sum()) * self.counts.shape[1]
        return int(self.counts.sum()) / tiles if tiles else float("nan")

    @property
    def trigger_rate(self) -> float:
        """Triggered tiles over tiles where a cut was made (those with a margin); NaN where none was."""
        eligible = int((~self.margin.isnan()).sum())
        return int(self.triggered.sum()) / eligible if eligible else float("nan")

    def __str__(self) -> str:
        b, h, t = self.counts.shape
        rate = self.trigger_rate
        return (
            f"Selection: {b} x {h} heads x {t} tiles of {self.tile} rows, {self.n_blocks} blocks of {self.block} keys; "
            f"effective budget {self.effective_budget:.1f}, kept {self.kept_fraction:.1%}, "
            + (f"triggered {rate:.1%}" if rate == rate else "nothing was cut")
        )

    def to(self, device: torch.device | str) -> Selection:
        tensors = {f: getattr(self, f).to(device) for f in ("lists", "counts", "margin", "triggered")}
        return dataclasses.replace(self, **tensors)

    @property
    def unlisted(self) -> Tensor:
        """bool `[B, H, T]`: tiles that keep every block they see, and more than there is room for in `lists`."""
        return self.counts > self.lists.shape[-1]

    @property
    def kv_idx(self) -> Tensor:
        """Every kept block. Where a tile is unlisted, asking for it widens `lists` to tiles x blocks, for kernels too:
        so what is written into it counts."""
        width = int(self.counts.max()) if self.counts.numel() else 0
        if width > self.lists.shape[-1]:
            untouched, block = self.untouched, torch.arange(width, dtype=torch.int32, device=self.lists.device)
            wide = torch.nn.functional.pad(self.lists, (0, width - self.lists.shape[-1]), value=self.n_blocks)
            every = torch.where(block < self.counts[..., None], block, self.n_blocks)
            object.__setattr__(self, "lists", torch.where(self.unlisted[..., None], every, wide))
            if untouched:
                object.__setattr__(self, "_made", self._versions())
        return self.lists

    def kept_mask(self, at: Any = ...) -> Tensor:
        """bool `[..., n_blocks]`: which blocks are kept, by all tiles or by those at an index into `[B, H, T]`."""
        index, counts = self.lists[at], self.counts[at]
        used = torch.arange(index.shape[-1], device=index.device) < counts[..., None]
        mask = torch.zeros(*counts.shape, self.n_blocks + 1, dtype=torch.bool, device=index.device)
        mask = mask.scatter_(-1, torch.where(used, index.long(), self.n_blocks), True)[..., :-1]
        first = torch.arange(self.n_blocks, device=index.device) < counts[..., None]
        return mask | (first & self.unlisted[at][..., None])

    def check(self) -> None:
        """Raises ValueError unless the kept blocks are ascending, distinct, visible and as many as counts says."""
        g = self.geometry
        if g.problem is not None:
            raise ValueError(f"selection.geometry is not one that select or from_blocks makes: {g.problem}")
        expected = (g.batch, self.lists.shape[1] if self.lists.ndim == 4 else -1, g.n_tiles)
        if self.lists.ndim != 4 or self.lists.dtype != torch.int32 or tuple(self.lists.shape[:3]) != expected:
            raise ValueError(
                f"selection.kv_idx must be int32 [B, H, T, width] with B = {g.batch}, T = {g.n_tiles}, "
                f"got {self.lists.dtype} {list(self.lists.shape)}"
            )
        if self.counts.dtype not in (torch.int32, torch.int64) or tuple(self.counts.shape) != expected:
            raise ValueError(
                f"selection.counts must be int32 or int64 [B, H, T] = {list(expected)}, "
                f"got {self.counts.dtype} {list(self.counts.shape)}"
            )
        width = self.lists.shape[3]
        visible = g.visible.to(self.counts.device)[:, None]
        bad = (self.counts < 0) | (self.unlisted & (self.counts < visible)) | (self.counts > visible)
        if bool(bad.any()):
            b, h, t = bad.nonzero()[0].tolist()
            raise ValueError(
                f"selection.counts[{b}, {h}, {t}] = {int(self.counts[b, h, t])}, but that tile sees "
                f"{int(visible[b, 0, t])} blocks and kv_idx has room for {width}: only a tile that keeps all it sees "
                "may keep more than that"
            )
        kept = torch.arange(width, device=self.lists.device) < self.counts[..., None]
        bad = kept & ((self.lists < 0) | (self.lists >= visible[..., None]))
        if bool(bad.any()):
            b, h, t, i = bad.nonzero()[0].tolist()
            raise ValueError(
                f"selection.kv_idx[{b}, {h}, {t}, {i}] = {int(self.lists[b, h, t, i])} is out of range: that tile "
                f"sees blocks 0 to {int(visible[b, 0, t]) - 1}"
            )
        bad = kept[..., 1:] & (self.lists[..., 1:] <= self.lists[..., :-1])
        if bool(bad.any()):
            b, h, t, i = bad.nonzero()[0].tolist()
            pair = self.lists[b, h, t, i : i + 2].tolist()
            raise ValueError(
                f"selection.kv_idx[{b}, {h}, {t}, {i}:{i + 2}] = {pair} must be ascending and distinct: sort the blocks"
            )
        self._check_group()

    def _check_group(self) -> None:
        """Raises unless the heads of a group keep the same blocks."""
        heads = self.counts.shape[1]
        if self.group < 1 or heads % self.group:
            raise ValueError(f"selection.group = {self.group} does not divide its {heads} heads")
        for name, kept in (("kv_idx", self.lists), ("counts", self.counts)) if self.group > 1 else ():
            groups = torch.unflatten(kept, 1, (-1, self.group))
            differs = groups != groups[:, :, :1]
            if bool(differs.any()):
                b, g, h, t = differs.nonzero()[0, :4].tolist()
                first = g * self.group
                raise ValueError(
                    f"selection.{name} differs between heads {first} and {first + h} at tile {t} of batch row {b}, but "
                    f"selection.group says that {self.group} heads share theirs: make it with group=1"
                )


def each_head(x: Tensor, group: int) -> Tensor:
    """`[B, H, ...]` from what `group` heads have in common, `[B, H / group, ...]`."""
    return x if group == 1 else x.unsqueeze(2).expand(*x.shape[:2], group, *x.shape[2:]).flatten(1, 2)


def gather_kept(ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
    """The lists of a ranking: the forced blocks and the first `counts - forced` ranked ones, ascending.

    A tile that keeps more than `width` keeps all it sees (`Selection.unlisted`).
    """
    sentinel = geometry.n_blocks
    free = (counts - ranked.forced[:, None])[..., None]
    slots = torch.arange(ranked.order.shape[-1], device=counts.device)
    chosen = ranked.order.masked_fill(slots >= free, sentinel)
    block = torch.arange(sentinel, dtype=torch.int32, device=counts.device)
    forced = geometry.forced_mask(sinks).to(counts.device)
    most = int(geometry.forced(sinks).max())
    must = torch.where(forced, block, sentinel).sort(-1).values[..., :most].to(torch.int32)
    must = must[:, None].expand(*chosen.shape[:3], most)
    listed = torch.cat([must, chosen], -1).sort(-1).values[..., :width]
    return torch.where((counts > width)[..., None], block[:width], listed).contiguous()


def select_all(geometry: Geometry, heads: int, device: torch.device) -> Selection:
    """Every visible block of every tile. The index tensor is shared by all heads."""
    block = torch.arange(geometry.n_blocks, dtype=torch.int32)
    visible = geometry.visible
    one = torch.where(block < visible[..., None], block, geometry.n_blocks).to(torch.int32)
    shape = (geometry.batch, heads, geometry.n_tiles)
    return Selection.made(
        lists=one[:, None].expand(*shape, -1).to(device),
        counts=visible.to(torch.int32)[:, None].expand(shape).to(device),
        margin=torch.full(shape, torch.nan, device=device),
        triggered=torch.zeros(shape, dtype=torch.bool, device=device),
        geometry=geometry,
    )
