"""From tile scores to rankings and kept blocks on the device, without asking it anything: no shape depends on data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...geometry import Geometry
from ...ranking import Ranked

# The most memory that scores take at once. A tile's row of scores is 8 bytes per block; what would be more is done for
# some heads, and if one head is too many for some of its tiles, at a time.
SCORE_BYTES = 256 * 2**20
NEVER = -(2**63)  # as in scores.py


def chunks(batch: int, heads: int, n_tiles: int, n_blocks: int) -> Iterator[tuple[slice, slice]]:
    """(heads, tiles) whose scores fit into SCORE_BYTES together."""
    most = max(1, SCORE_BYTES // (8 * batch * n_blocks))
    some_heads, some_tiles = max(1, most // n_tiles), min(most, n_tiles)
    for h in range(0, heads, some_heads):
        for t in range(0, n_tiles, some_tiles):
            yield slice(h, min(h + some_heads, heads)), slice(t, min(t + some_tiles, n_tiles))


def unpack(best: Tensor, n_blocks: int) -> tuple[Tensor, Tensor]:
    """Blocks and scores from the sortable numbers of scores.py."""
    none = best == NEVER
    block = (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(torch.int32)
    ascending = (best >> 32).to(torch.int32)
    score = (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return block.masked_fill(none, n_blocks), score.masked_fill(none, -torch.inf)


def gather_kept(ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
    """kv_idx from a ranking: the forced blocks and the first `counts - forced` ranked ones, ascending.

    `geometry` has its tensors where `ranked` has them.
    """
    sentinel = geometry.n_blocks
    slot = torch.arange(ranked.order.shape[-1], device=counts.device)
    chosen = ranked.order.masked_fill(slot >= (counts - ranked.forced[:, None])[..., None], sentinel)
    # As many slots as any tile of any plan can need, so that nothing has to be read back.
    most = min(sinks + (geometry.tile + geometry.block - 2) // geometry.block + 1, sentinel)
    slot = torch.arange(most, device=counts.device)
    own = geometry.first_own()[..., None]
    first = own.clamp(max=sinks)
    must = torch.where(slot < first, slot, own + slot - first)
    must = torch.where(must < geometry.visible[..., None], must, sentinel).to(torch.int32)
    must = must[:, None].expand(*chosen.shape[:3], most)
    return torch.cat([must, chosen], -1).sort(-1).values[..., :width].contiguous()
