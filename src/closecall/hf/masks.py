"""What a model's mask says, as segment ids: the one small tensor our attention needs instead of rows x keys booleans.

transformers asks a function per attention implementation to build the mask. Ours returns int32 `[B, N]` over the keys
the cache will hand out: the number of the key's sequence from 1 on, 0 for padding, -1 for keys not seen yet (a static
cache is longer than what it holds). Masks that are not causal attention within sequences (a sliding window, image
tokens that see each other, ...) are left to the function the model had before, and so is the attention that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UNSEEN, PADDING = -1, 0


def segment_ids(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    attention_mask: Tensor | None,
    starts: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    """Segment ids from padding (bool, the first so many keys) and sequence starts (bool `[B, kv_length]`)."""
    position = torch.arange(kv_length, device=device)
    ids = torch.ones(batch_size, kv_length, dtype=torch.int32, device=device)
    if starts is not None:
        ids = ids + starts.cumsum(1, dtype=torch.int32)
    if attention_mask is not None:
        real = torch.zeros(batch_size, kv_length, dtype=torch.bool, device=device)
        length = min(kv_length, attention_mask.shape[1])
        real[:, :length] = attention_mask[:, :length].bool()
        ids = ids.masked_fill(~real, PADDING)
    return ids.masked_fill(position >= q_offset + q_length, UNSEEN)


def is_segments(mask: Any) -> bool:
    """Whether a mask is one of ours: nobody else makes int32 masks."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.ndim == 2


def from_cu_seqlens(cu_seqlens: Tensor, batch: int, rows: int, length: int) -> Tensor:
    """Segment ids `[1, length]` of sequences packed one after the other."""
    if batch != 1 or rows != length:
        raise ValueError(
            f"cu_seq_lens_q packs whole sequences into one batch row with an empty cache: needs batch 1 and as many "
            f"keys as rows, got batch {batch}, {rows} rows and {length} keys"
        )
    starts = torch.zeros(1, length + 1, dtype=torch.int32, device=cu_seqlens.device)
    starts[0, cu_seqlens.long()] = 1
    return starts[:, :length].cumsum(1, dtype=torch.int32)


def mask_function(original: Callable[..., Any] | None) -> Callable[..., Any]:
    """The mask function that goes with our attention; `original` is the one of the implementation it replaces."""

    def closecall_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int | Tensor = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> Any:
        from transformers.masking_utils import causal_mask_function

        plain = mask_function in (None, causal_mask_function)
        # Without a user's mask function (use_vmap), an intersection is causal attention within packed sequences; a
        # union lets some tokens look ahead.
        packed = getattr(mask_function, "__name__", "") == "and_mask"
        custom = local_size is not None or use_vmap or isinstance(kv_offset, Tensor) or kv_offset != 0
        custom = custom or not (plain or packed)
        starts = None
        if packed and not custom:
            # A sequence starts where a key is not seen from the next position.
            assert mask_function is not None
            at = torch.arange(1, kv_length, device=device)
            rows = torch.arange(batch_size, device=device)[:, None]
            head = torch.zeros((), dtype=torch.long, device=device)
            back = mask_function(rows, head, at[None], at[None] - 1)
            starts = torch.nn.functional.pad(~back.expand(batch_size, -1), (1, 0))
        if custom:
            if original is None:
                return attention_mask
            kwargs |= {"local_size": local_size} if local_size is not None else {}
            return original(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, device=device, **kwargs,
            )  # fmt: skip
        return segment_ids(batch_size, q_length, kv_length, q_offset, attention_mask, starts, device)

    return closecall_mask
