"""Block summaries that are kept from call to call, for keys that only grow: decoding, and prefill in chunks.

The summary of a complete block never changes as keys are appended, so it is made only once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Summaries:
    """The block summaries of one layer's keys, handed to `select` or `attention` call after call.

    The contract: `k` holds the keys of the call before, unchanged, and then new ones. Blocks that were complete then
    are not read again; what is selected is the same, bit for bit. After keys were dropped (rejected guesses, another
    continuation of a shared prefix) call `crop(n_keys)` with how many are left; before other keys, call `reset()`. A
    change of shape, type, block size, scorer or instruction set is noticed, and summaries start over.

    The `cpu` backend keeps the summaries of the scorers it has kernels for. Elsewhere nothing is kept, every call reads
    all keys, and `reused` stays 0.

    >>> import torch, closecall
    >>> q, k = torch.randn(1, 2, 640, 64), torch.randn(1, 1, 640, 64)
    >>> policy, kept = closecall.policy("quest", budget=2), closecall.Summaries()
    >>> prompt = closecall.select(q[:, :, :600], k[:, :, :600], policy, summaries=kept)
    >>> token = closecall.select(q[:, :, 600:601], k[:, :, :601], policy, summaries=kept)
    >>> kept.n_keys
    601
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the next call may have any keys."""
        self._kind: object = None
        self._block = 1
        self._n_keys = 0
        self._store: Tensor | None = None
        self._reused = 0

    def crop(self, n_keys: int) -> None:
        """Forgets what lies behind the first `n_keys` keys. Cropping to more than there are changes nothing."""
        if not isinstance(n_keys, int) or isinstance(n_keys, bool) or n_keys < 0:
            raise ValueError(f"n_keys must be a whole number of keys to keep, at least 0, got {n_keys!r}")
        self._n_keys = min(self._n_keys, n_keys)

    @property
    def n_keys(self) -> int:
        """How many keys are summarised: those of the last call, or fewer after `crop`."""
        return self._n_keys

    @property
    def reused(self) -> int:
        """Blocks of every sequence and key head that the last call did not read again."""
        return self._reused

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return 0 if self._store is None else self._store.nbytes

    def __repr__(self) -> str:
        blocks, mib = self._n_keys // self._block, self.nbytes / 2**20
        return f"Summaries of {self._n_keys} keys: {blocks} complete blocks of {self._block}, {mib:.1f} MiB"

    # -- for select and the backends -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Marks the start of a call: nothing has been reused in it yet."""
        self._reused = 0

    def prepare(self, k: Tensor, block: int, kind: object, block_bytes: Callable[[], int]) -> tuple[Tensor, int]:
        """Returns a store of bytes `[B, Hkv, room, block_bytes]` for all blocks of `k`, and how many blocks are done.

        `kind` is all that summaries depend on besides keys, their shape and the block size.
        """
        batch, heads, n_keys, dim = k.shape
        kind = (kind, batch, heads, dim, k.dtype, k.device, block)
        if self._kind != kind:
            self.reset()
            self._kind, self._block = kind, block
        if n_keys < self._n_keys:
            raise ValueError(
                f"k holds {n_keys} keys but these summaries know {self._n_keys}: say summaries.crop(n) with how many "
                "of the earlier keys are still there, unchanged, or summaries.reset() for other keys"
            )
        done, needed = self._n_keys // block, -(-n_keys // block)
        store = self._store
        if store is None or store.shape[2] < needed:
            room = needed if store is None else max(needed, store.shape[2] * 3 // 2)
            size = block_bytes() if store is None else store.shape[3]
            grown = torch.empty(batch, heads, room, size, dtype=torch.uint8, device=k.device)
            if store is not None:
                grown[:, :, :done] = store[:, :, :done]
            self._store = store = grown
        return store, done

    def finish(self, n_keys: int, reused: int) -> None:
        """Records that the store holds the blocks of `n_keys` keys, of which the first `reused` were there before."""
        self._n_keys, self._reused = n_keys, reused
