"""Argument checks shared by the public functions. Each error names the argument, what it got, and what to do."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeGuard

import torch
from torch import Tensor

MOST_KEY_HEADS = 128  # of any model we know; more must be something else
MOST = 2**31 - 1  # blocks, and what is counted in them: `kv_idx` is int32
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_tensors(named: dict[str, Tensor]) -> None:
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be 4-D [batch, heads, length, dim], got shape {list(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"{name} has an empty dimension: shape {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}: convert it with .to()")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires gradients and closecall is forward only: call it under torch.no_grad()")
    first, q = next(iter(named.items()))
    for name, x in named.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but {first} is {q.dtype}: convert them to one type")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but {first} is on {q.device}: move them to one device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {x.shape[0]} but {first} has {q.shape[0]}: they must be equal")
    if q.is_meta:
        raise ValueError(f"{', '.join(named)} are on the meta device and hold no numbers: make them on a real one")


def _swapped(k: Tensor) -> str:
    """Describes the problem if k looks like [batch, length, heads, dim]: no model has so many key heads."""
    heads, length = k.shape[1], k.shape[2]
    if heads <= MOST_KEY_HEADS or length >= heads:
        return ""
    return (
        f"k of shape {list(k.shape)} looks like [batch, length, heads, dim], but closecall takes [batch, heads, "
        "length, dim]: transpose(1, 2) q, k and v"
    )


def _check_heads(q: Tensor, k: Tensor) -> None:
    hint = f"; {swapped}" if (swapped := _swapped(k)) else ""
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]} but k has {k.shape[3]}: they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the {k.shape[1]} key heads{hint}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} rows but k only {k.shape[2]} keys: row i sits at key N - M + i, so M must be at most N"
            f"{hint}"
        )
    if swapped:
        warnings.warn(swapped, stacklevel=4)


def check_qk(q: Tensor, k: Tensor) -> None:
    _check_tensors({"q": q, "k": k})
    _check_heads(q, k)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_tensors({"q": q, "k": k, "v": v})
    _check_heads(q, k)
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"v has {v.shape[1]} heads and {v.shape[2]} keys but k has {k.shape[1]} and {k.shape[2]}: make them equal"
        )


def check_scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if not is_finite(scale) or scale <= 0:
        raise ValueError(f"scale must be a positive number (None means 1/sqrt(head dim)), got {scale!r}")
    return float(scale)


def check_softcap(softcap: float) -> None:
    if not is_finite(softcap) or softcap < 0:
        raise ValueError(f"softcap must be a positive number, or 0 for none, got {softcap!r}")


def check_prompt_len(prompt_len: int | None, keys: int, *, packed: bool = False) -> None:
    if prompt_len is None:
        return
    if not is_whole(prompt_len) or prompt_len < keys:
        raise ValueError(
            f"prompt_len must be a whole number of keys, at least the {keys} that are there, got {prompt_len!r}: it "
            "counts those of this call, of earlier and of later ones; leave it out where tokens are decoded"
        )
    if prompt_len > sys.maxsize:
        raise ValueError(f"prompt_len must be at most {sys.maxsize}, got {prompt_len}: while it is unknown, give that")
    if packed:
        raise ValueError("prompt_len and cu_seqlens exclude each other: packed prompts are whole, none comes in chunks")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """A number that a float can hold: an integer may be larger."""
    return isinstance(value, (int, float)) and is_number(value) and abs(value) <= sys.float_info.max


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@functools.lru_cache(maxsize=256)
def exact(number: float, most: int = 10**9) -> Fraction:
    """The fraction that a user means who typed this decimal, or computed one third: 1.1 times 110 is 121. Its
    denominator is at most `most`, so that products with counts stay within int64."""
    return Fraction(str(number)).limit_denominator(most)


def check_layers(layers: Sequence[int], values: Sequence[object], what: str) -> tuple[int, ...]:
    """The numbers of the layers that a list has one entry for each of; 0, 1, ... where none are given."""
    listed = isinstance(layers, Sequence) and all(map(is_whole, layers))
    numbers = tuple(layers) or tuple(range(len(values))) if listed else ()
    if not listed or len(numbers) != len(values) or list(numbers) != sorted(set(numbers)) or min(numbers) < 0:
        raise ValueError(
            f"layers must be ascending layer numbers, one for each of the {len(values)} {what}, got {layers!r}"
        )
    return numbers


def check_tiles(tiles: int | None) -> None:
    if tiles is not None and (not is_whole(tiles) or tiles < 1):
        raise ValueError(f"tiles must be a whole number of at least 1, or None for all of them, got {tiles!r}")


def check_share(name: str, value: object, of: str) -> None:
    """A number above 0 and at most 1."""
    if not isinstance(value, (int, float)) or not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], {of}, got {value!r}")
