"""The fixed list of calls that a backend is checked on. Names are stable: reports of two machines compare by them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from closecall.info import DTYPES
from closecall.policy import Policy, accepted, policy

from ...spine.numbers import TYPES

POLICIES = ("dense", "topk", "quest", "router", "router-on-quest")  # the paper's
SMALL = {"budget": 3}  # tile budget 6 of 14 blocks, 12 where triggered: something is cut at both
FAR = 2**31 + 64  # elements between two heads: past 32-bit offsets


@dataclass(frozen=True)
class Case:
    """One call of the operator. Integers have scores that are exact in float32 and tie often: there, the selection must
    equal the reference's block for block, margin for margin."""

    name: str
    preset: str = "router-on-quest"
    dtype: str = "bf16"
    dim: int = 64
    value_dim: int | None = None
    heads: int = 2
    kv_heads: int = 1
    batch: int = 1
    rows: int | None = None  # as many as keys
    keys: int = 896
    pad: str | None = None  # "left" or "right": the batch rows get shorter one by one
    packed: tuple[int, ...] = ()
    integers: bool = False
    layout: str = "plain"
    softcap: float = 0.0
    scale: float | None = None
    gain: float = 1.0  # of the queries: large ones make the softmax peaked
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def policy(self) -> Policy:
        return policy(self.preset, **accepted(self.preset, SMALL | self.overrides))

    def arguments(self) -> dict[str, Any]:
        """key_padding or cu_seqlens, on the CPU."""
        if self.packed:
            return {"cu_seqlens": torch.tensor([0, *self.packed]).cumsum(0).to(torch.int32)}
        if self.pad is None:
            return {}
        at = torch.arange(self.keys).expand(self.batch, -1)
        lengths = self.keys - torch.arange(self.batch)[:, None] * (self.keys // 3 + 5)
        return {"key_padding": at < lengths if self.pad == "right" else at >= self.keys - lengths}

    def tensors(self, place: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v. The numbers are drawn on the CPU, so that every device gets the same."""
        generator = torch.Generator().manual_seed(7)
        rows = self.rows or self.keys

        def draw(heads: int, n: int, dim: int, whole: bool) -> Tensor:
            shape = (self.batch, heads, n, dim)
            if whole:
                return torch.randint(-3, 4, shape, generator=generator).float()
            return torch.randn(shape, generator=generator)

        q = draw(self.heads, rows, self.dim, self.integers) * self.gain
        k = draw(self.kv_heads, self.keys, self.dim, self.integers)
        v = draw(self.kv_heads, self.keys, self.value_dim or self.dim, False)
        if self.integers:  # every third block is the same, so that scores tie
            k = k[:, :, torch.arange(self.keys) % (3 * self.policy().block)]
        padding = self.arguments().get("key_padding")
        if padding is not None:  # whoever reads padding gets NaN
            q = q.masked_fill(~padding[:, None, self.keys - rows :, None], torch.nan)
            k, v = (x.masked_fill(~padding[:, None, :, None], torch.nan) for x in (k, v))
        q, k, v = (laid_out(x.to(DTYPES[self.dtype]).to(place), self.layout) for x in (q, k, v))
        return q, k, v

    def bytes_needed(self) -> int:
        """Of the inputs; only far-apart heads need much."""
        numbers = FAR * (self.heads + 2 * self.kv_heads - 3) if self.layout == "far" else 0
        return numbers * DTYPES[self.dtype].itemsize


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other strides; what lies between them is NaN."""
    if layout == "projected":  # how a projection leaves it: [B, N, H, D]
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "spaced":  # the last stride is not 1
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if layout == "inner":
        outer = torch.full([n + 3 for n in x.shape], torch.nan, dtype=x.dtype, device=x.device)
        window = outer[1:-2, 2:-1, 1:-2, 2:-1]
        return window.copy_(x)
    if layout == "far":
        buffer = torch.empty(FAR * (x.shape[1] - 1) + x[0, 0].numel(), dtype=x.dtype, device=x.device)
        return buffer.as_strided(x.shape, (0, FAR, x.shape[3], 1)).copy_(x)
    return x


def _listed() -> Iterator[Case]:
    for preset in POLICIES:
        for dtype in TYPES:
            yield Case(f"{preset}, {dtype}", preset, dtype)
    for preset in POLICIES[1:]:
        for dtype in TYPES:
            yield Case(f"{preset}, {dtype}, exact scores with ties", preset, dtype, integers=True, scale=0.125)
    for dim in (64, 96, 128, 192, 256):
        for dtype in TYPES:
            yield Case(f"head dim {dim}, {dtype}", dtype=dtype, dim=dim, preset="router")
    for heads, kv_heads in ((1, 1), (4, 4), (4, 2), (7, 1), (9, 3), (16, 2)):
        yield Case(f"{heads} heads on {kv_heads}", heads=heads, kv_heads=kv_heads)
    shared = {"share": "group"}  # an odd group leaves a program with one head's rows to spare
    for dtype in TYPES:
        yield Case(f"heads that share, {dtype}", dtype=dtype, heads=3, overrides=shared)
        yield Case(f"heads that share, {dtype}, exact scores with ties", "router", dtype, heads=3, integers=True,
                   scale=0.125, overrides=shared)  # fmt: skip
    for dim in (96, 128, 192, 256):
        yield Case(f"heads that share, head dim {dim}", dim=dim, heads=4, kv_heads=2, overrides=shared)
    yield Case("heads that share, tiles of 16", heads=7, keys=300, overrides=shared | {"block": 32, "tile": 16})
    yield Case("heads that share, packed", heads=4, packed=(500, 1, 64, 700), keys=1265, overrides=shared)
    yield Case("heads that share, decode", heads=8, rows=1, keys=1000, overrides=shared)
    for keys in (1, 63, 65, 833, 895, 897):
        yield Case(f"{keys} keys", dtype="fp32", keys=keys)
    for rows in (2, 4, 16, 17, 63, 65, 200, 640):
        yield Case(f"{rows} rows at the end of 900 keys", rows=rows, keys=900)
    for preset in POLICIES:
        yield Case(f"decode, {preset}", preset, rows=1, keys=1000, heads=8)
    yield Case("decode, fp32, head dim 128", dtype="fp32", dim=128, rows=1, keys=1000, heads=8)
    yield Case("decode of a padded batch", rows=1, keys=1000, batch=2, pad="left")
    for pad in ("left", "right"):
        yield Case(f"padded on the {pad}", batch=3, pad=pad, keys=900)
        yield Case(f"padded on the {pad}, fp32, exact scores with ties", "router", "fp32", batch=2, pad=pad, keys=960,
                   integers=True, scale=0.125)  # fmt: skip
    yield Case("padded on the left, 130 rows", batch=2, pad="left", rows=130)
    yield Case("packed", packed=(500, 1, 64, 700), keys=1265)
    yield Case("packed, fp32, exact scores with ties", "router", "fp32", packed=(576, 640, 70), keys=1286,
               integers=True, scale=0.125)  # fmt: skip
    yield Case("a batch of 3", batch=3, keys=640)
    for dim, value_dim in ((64, 128), (128, 64), (192, 128)):
        yield Case(f"head dim {dim}, value dim {value_dim}", dim=dim, value_dim=value_dim)
    for layout in ("projected", "spaced", "inner"):
        yield Case(f"strides: {layout}", layout=layout)
    yield Case("strides: far, past 32-bit offsets", layout="far", heads=2, kv_heads=2, keys=600)
    for dtype in TYPES:
        yield Case(f"softcap 5, {dtype}", dtype=dtype, softcap=5.0, gain=4.0)
    yield Case("softcap 50, decode", softcap=50.0, gain=8.0, rows=1)
    yield Case("peaked softmax", gain=40.0)
    yield Case("scale 0.3", scale=0.3)
    for trigger in ("per-cell", "absolute", "random", "last"):
        yield Case(f"trigger: {trigger}", "router", overrides={"trigger": trigger})
    yield Case("mean over a tile's rows", "topk", overrides={"aggregate": "mean"})
    yield Case("no sink block", "quest", overrides={"sinks": 0})
    yield Case("blocks of 32, tiles of 64", overrides={"block": 32}, keys=600)
    yield Case("blocks of 128, tiles of 64", overrides={"block": 128}, keys=1600)
    yield Case("tiles of 32", overrides={"tile": 32}, keys=600)
    yield Case("longer: 4,000 keys", "router-on-quest", dim=128, rows=192, keys=4000,
               overrides={"budget": 8})  # fmt: skip


CASES = tuple(_listed())


class Named(Protocol):
    @property
    def name(self) -> str: ...


Some = TypeVar("Some", bound=Named)


def matching(patterns: Sequence[str], every: Sequence[Some]) -> tuple[Some, ...]:
    """Those whose names match any of the shell patterns; all if there are none."""
    names = [case.name for case in every]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no case is called {pattern!r}: {hint}`closecall validate --list` names them all")
    return tuple(c for c in every if not patterns or any(fnmatchcase(c.name, p) for p in patterns))
