"""From tile scores to rankings and kept blocks on the device, without asking it anything: no shape depends on data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry import Geometry
from ...policy import Policy
from ...ranking import Ranked

# The most memory that scores take at once. A tile's row of scores is 4 bytes per block, and 8 where a rule wants it
# sorted; what would be more is done for some heads, and if one head is too many for some of its tiles, at a time.
SCORE_BYTES = 256 * 2**20
NEVER = -(2**31)  # as in scores.py


@dataclass(frozen=True, eq=False)
class Best(Ranked):
    """The best blocks of every tile in the order of the blocks, not of their scores: for rules that ask for scores at
    ranks alone. `scores` holds the int32 numbers of scores.py."""

    scores_at: Callable[[Tensor, Tensor], Tensor] | None = None

    def at(self, ranks: Tensor) -> Tensor:
        assert self.scores_at is not None
        return self.scores_at(self.scores, ranks)


def check_capture(device: torch.device, policy: Policy, has_kernel: bool) -> None:
    """A RuntimeError if a CUDA graph is being captured that cannot hold the ranking and the rule's decision."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    if policy.rule.reads_back:
        who, others = f"rule {policy.rule.name!r}", "rules topk, router, and last-tile over one of them, do not"
    elif not has_kernel:
        who, others = f"scorer {policy.scorer.name!r}" if policy.scorer else "the ranking", "mean, quest and box do not"
    else:
        return
    raise RuntimeError(
        f"a CUDA graph is being captured, and {who} reads numbers back from the device, which no graph can hold "
        f"({others}): make this call outside the graph"
    )


def chunks(
    batch: int, heads: int, n_tiles: int, n_blocks: int, group: int, packed: int = 1
) -> Iterator[tuple[slice, slice]]:
    """(heads, tiles) whose scores fit into SCORE_BYTES together. `group` heads that are ranked as one stay together,
    and so do every `packed` tiles."""
    most = max(1, SCORE_BYTES // (8 * batch * n_blocks * group))
    some_heads, some_tiles = max(1, most // n_tiles) * group, min(max(most // packed, 1) * packed, n_tiles)
    for h in range(0, heads, some_heads):
        for t in range(0, n_tiles, some_tiles):
            yield slice(h, min(h + some_heads, heads)), slice(t, min(t + some_tiles, n_tiles))


def best(ascending: Tensor, width: int, listed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best blocks, best first and ties to the lower one, and their scores, from the numbers of scores.py: of all
    blocks, or of those `listed`, which ascend and end in the sentinel."""
    n_blocks = ascending.shape[-1]
    falling = torch.arange(n_blocks - 1, -1, -1, device=ascending.device)
    top = ((ascending.long() << 32) | falling).topk(width, dim=-1).values
    block = (n_blocks - 1 - (top & 0xFFFFFFFF)).to(torch.int32)
    ascending = (top >> 32).to(torch.int32)
    none = ascending == NEVER
    score = (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).view(torch.float32)
    block = block.masked_fill(none, n_blocks) if listed is None else listed.gather(-1, block.long())
    return block, score.masked_fill(none, -torch.inf)


def in_order(ascending: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best blocks in the order of the blocks, and their numbers: what the select kernel makes of shorter rows."""
    n_blocks = ascending.shape[-1]
    block = best(ascending, width)[0].sort(-1).values
    number = ascending.gather(-1, block.clamp(max=n_blocks - 1).long())
    return block, number.masked_fill(block == n_blocks, NEVER)


def gather_kept(ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
    """kv_idx from a ranking: the forced blocks and the first `counts - forced` ranked ones, ascending.

    `geometry` has its tensors where `ranked` has them. A tile that keeps more than `width` keeps all it sees.
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
    listed = torch.cat([must, chosen], -1).sort(-1).values[..., :width]
    first = torch.arange(listed.shape[-1], dtype=torch.int32, device=counts.device)
    return torch.where((counts > width)[..., None], first, listed).contiguous()
