"""The ways people call a model, each from tokens `[2, LENGTH]` to logits of real rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import families

LENGTH, PADDED = 150, 41
STEPS = 4
PACKED = (20, 1, LENGTH - 21)


def padded(x: Tensor, side: str) -> Tensor:
    """An attention mask for `x` whose first row is shorter by an amount that is no multiple of a block."""
    mask = torch.ones_like(x)
    mask[0, slice(PADDED) if side == "left" else slice(-PADDED, None)] = 0
    return mask


def batch_of_one(model: Any, x: Tensor) -> Tensor:
    return model(x[:1]).logits


def no_cache(model: Any, x: Tensor) -> Tensor:
    return model(x, use_cache=False).logits


def left_padding(model: Any, x: Tensor) -> Tensor:
    mask = padded(x, "left")
    return model(x, attention_mask=mask).logits[mask.bool()]


def right_padding(model: Any, x: Tensor) -> Tensor:
    mask = padded(x, "right")
    return model(x, attention_mask=mask).logits[mask.bool()]


def generate(model: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """Logits step by step. The greedy tokens are the same in all precisions, or the comparison fails on its own."""
    kwargs = {"attention_mask": padded(x, "left"), "max_new_tokens": STEPS, "min_new_tokens": STEPS} | kwargs
    out = model.generate(x, do_sample=False, return_dict_in_generate=True, output_logits=True, **kwargs)
    return torch.stack(out.logits)


def static_cache(model: Any, x: Tensor) -> Tensor:
    return generate(model, x, cache_implementation="static")


def assisted(model: Any, x: Tensor) -> Tensor:
    """Several rows per step and a cache that shrinks when a guess was wrong."""
    repeated = x[:1, :30].repeat(1, 4)  # so that looking up guesses in the prompt finds some
    return generate(model, repeated, attention_mask=torch.ones_like(repeated), prompt_lookup_num_tokens=3)


def beams(model: Any, x: Tensor) -> Tensor:
    """A cache whose rows are reordered between steps."""
    return generate(model, x, num_beams=2)


def chunks(model: Any, x: Tensor) -> Tensor:
    """Prefill in pieces that start off the block grid, left padding in the first."""
    cache, mask = DynamicCache(config=model.config), padded(x, "left")
    got, at = [], 0
    for piece in x.split([50, 37, LENGTH - 87], 1):
        seen = mask[:, : at + piece.shape[1]]
        position = (seen.cumsum(1) - 1).clamp(min=0)[:, at:]
        out = model(piece, attention_mask=seen, position_ids=position, past_key_values=cache, use_cache=True)
        got.append(out.logits[seen[:, at:].bool()])
        at += piece.shape[1]
    return torch.cat(got)


def growing_right_padding(model: Any, x: Tensor) -> Tensor:
    """A cache that holds padding between real keys: prompts of different lengths padded on the right, continued."""
    cache, mask = DynamicCache(config=model.config), padded(x, "right")
    got = [model(x, attention_mask=mask, past_key_values=cache).logits[mask.bool()]]
    for step, rows in enumerate((20, 1, 1)):
        piece = families.tokens(2, rows, seed=7 + step)
        new = torch.ones_like(piece)
        new[1, 17:] = 0
        mask = torch.cat([mask, new], 1)
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, -rows:]
        out = model(piece, attention_mask=mask, position_ids=position, past_key_values=cache)
        got.append(out.logits[new.bool()])
    return torch.cat(got)


def packed(model: Any, x: Tensor) -> Tensor:
    """Three sequences in one row, by position ids that start again."""
    position = torch.cat([torch.arange(n) for n in PACKED])[None]
    return model(x[:1], position_ids=position, use_cache=False).logits


def own_mask(model: Any, x: Tensor) -> Tensor:
    """A mask of the caller's own, 4-D: not every earlier token is seen."""
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    sees[100:, 3:90] = False
    mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=model.dtype)
    return model(x, attention_mask=mask.masked_fill(~sees, torch.finfo(model.dtype).min)).logits


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        batch_of_one, no_cache, left_padding, right_padding, generate, static_cache, assisted, beams, chunks,
        growing_right_padding, packed, own_mask,
    )
}  # fmt: skip
