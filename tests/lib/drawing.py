"""Hypothesis strategies: whole calls of the operator, from shape to strides to policy."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closecall
import oracle
from closecall.policy import accepted
from engines import FLOATS, Engine

HEADS = [(1, 1), (2, 1), (4, 2), (5, 1), (7, 7), (9, 3), (16, 2), (28, 4), (40, 8)]
DIMS = [32, 64, 80, 96, 128, 192, 256, 33, 100, 1]
BLOCKS = [16, 32, 64, 128, 8, 1]
PRESETS = {"topk": "mean", "quest": "quest", "router": "mean", "router-on-quest": "quest", "dense": None}
TRIGGERS = ["quantile", "per-cell", "absolute", "random", "last"]
SEED_BITS = 32
LAYOUTS = ["plain", "bnhd", "spaced", "shared-heads", "shared-batch", "inner"]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same shape in other strides; the shared ones repeat the first head's or batch row's numbers."""
    if layout == "bnhd":  # how a projection leaves it: [B, N, H, D]
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "spaced":  # the last stride is not 1
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if layout == "shared-heads":
        return x[:, :1].expand_as(x)
    if layout == "shared-batch":
        return x[:1].expand_as(x)
    if layout == "inner":  # a window of a larger buffer whose surroundings are poison
        outer = torch.full([n + 3 for n in x.shape], torch.nan, dtype=x.dtype)
        window = outer[1:-2, 2:-1, 1:-2, 2:-1]
        window.copy_(x)
        return window
    return x


@dataclass(frozen=True)
class Case:
    """One call. `tensors()` and `arguments()` are functions of the fields, so that a failure prints all there is."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    sequences: str  # "whole", "left" or "right" padded, "packed"
    lengths: list[int]  # of the padded batch rows or the packed sequences
    preset: str
    overrides: dict[str, Any]
    numbers: str  # "normal", "integers", or "ties": integers in which blocks repeat
    seed: int
    scale: float | None = None
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")
    poison: bool = True  # fill padding with NaN rather than with numbers

    @property
    def block(self) -> int:
        return self.overrides.get("block", 64)

    @property
    def tile(self) -> int:
        return self.overrides.get("tile", 64)

    @property
    def sinks(self) -> int:
        return self.overrides.get("sinks", 1)

    @property
    def aggregate(self) -> str:
        return self.overrides.get("aggregate", "max")

    @property
    def group(self) -> int:
        """How many heads decide together."""
        return self.heads // self.kv_heads if self.overrides.get("share") == "group" else 1

    @property
    def tile_budget(self) -> int:
        return round(self.overrides.get("budget", 33) * self.overrides.get("tile_factor", 2))

    @property
    def expanded_budget(self) -> int:
        return math.floor(self.overrides.get("rho", 2) * self.tile_budget)

    @property
    def used_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def scorer(self) -> str | None:
        return PRESETS[self.preset]

    def policy(self) -> closecall.Policy:
        return closecall.policy(self.preset, **accepted(self.preset, self.overrides))

    def arguments(self) -> dict[str, Any]:
        """key_padding or cu_seqlens."""
        if self.sequences == "packed":
            return {"cu_seqlens": torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)}
        if self.sequences == "whole":
            return {}
        at = torch.arange(self.k_len).expand(self.batch, -1)
        n = torch.tensor(self.lengths)[:, None]
        return {"key_padding": at < n if self.sequences == "right" else at >= self.k_len - n}

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        most = 1 if self.aggregate == "mean" else 3  # so that sums of sums stay exact in float32

        def draw(heads: int, n: int, dim: int) -> torch.Tensor:
            shape = (self.batch, heads, n, dim)
            if self.numbers == "normal":
                return torch.randn(shape, generator=generator)
            return torch.randint(-most, most + 1, shape, generator=generator).float()

        q, k = draw(self.heads, self.q_len, self.dim), draw(self.kv_heads, self.k_len, self.dim)
        v = torch.randn(self.batch, self.kv_heads, self.k_len, self.v_dim, generator=generator)
        if self.numbers == "ties":
            period = self.block * (1 + self.seed % 3)
            k = k[:, :, torch.arange(self.k_len) % period]
            q = q[:, :, torch.arange(self.q_len) % self.tile]
        padding = self.arguments().get("key_padding")
        # Where batch rows share memory, one row's padding is another's real key.
        if padding is not None and self.poison and "shared-batch" not in self.layouts:
            q = q.masked_fill(~padding[:, None, self.k_len - self.q_len :, None], torch.nan)
            k, v = (x.masked_fill(~padding[:, None, :, None], torch.nan) for x in (k, v))
        q, k, v = (laid_out(x.to(self.dtype), layout) for x, layout in zip((q, k, v), self.layouts, strict=True))
        return q, k, v

    def tiles(self) -> list[oracle.Tile]:
        return oracle.tiles(self.batch, self.q_len, self.k_len, self.block, self.tile, **self.arguments())


def drawn(
    seed: int,
    *,
    numbers: tuple[str, ...],
    presets: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    sequences: tuple[str, ...],
    odd_blocks: bool,
    work: int,
    cells: int,
) -> Case:
    r = random.Random(seed)
    work = work * seed.bit_length() // SEED_BITS  # smaller seeds make smaller cases: that is how failures shrink
    style = r.choice(sequences)
    batch = 1 if style == "packed" else r.choice([1, 1, 2, 3])
    heads, kv_heads = r.choice(HEADS)
    sizes = BLOCKS + ([24, 5] if odd_blocks else [])
    sinks = r.choice([1, 1, 0, 2])
    preset = r.choice(presets)
    room = max(40, work // (batch * heads))

    # The rule's numbers: room for at least two free blocks beside the most that can be forced. Of three draws, the
    # first whose budget leaves something to cut.
    for _ in range(3):
        block, tile = r.choice(sizes), r.choice(sizes)
        most_forced = sinks + (tile + block - 2) // block + 1
        tile_budget = most_forced + r.randint(2, 6)
        enough = block * (tile_budget + 1) + tile
        if enough <= room:
            break
    factor = r.choice([f for f in (2, 1, 3, 0.5, 1.5) if tile_budget % f == 0])
    overrides: dict[str, Any] = {"block": block, "tile": tile, "sinks": sinks}
    overrides |= {"budget": round(tile_budget / factor), "tile_factor": factor}
    overrides["aggregate"] = r.choice(["max", "max", "mean"])
    if preset.startswith("router"):
        trigger = r.choice(TRIGGERS)
        overrides |= {"trigger": trigger, "q": r.choice([0.4, 0, 1, 0.07, 0.5]), "rho": r.choice([2, 1, 1.5, 3])}
        if trigger == "absolute":
            overrides["threshold"] = r.choice([0.05, 0.3])
        if trigger == "random":
            overrides["seed"] = r.randint(0, 3)

    if random.Random(seed + 1).random() < 0.4:
        overrides["share"] = "group"

    # Lengths: mostly past the budget, and no more tiles than asked for.
    most_rows = max(1, cells // (batch * heads)) * tile
    most = min(room, 2 * enough + 3 * tile, most_rows if style == "packed" else room)
    k_len = r.randint(min(enough, most), most) if r.random() < 0.8 else r.randint(1, most)
    q_len, lengths = k_len, []
    if style == "packed":
        cuts = [r.randint(0, r.choice([k_len, min(k_len, tile)])) for _ in range(r.randint(0, 3))]
        bounds = sorted([0, *cuts, k_len])
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        lengths = r.sample(lengths, len(lengths))
    else:
        q_len = min(r.choice([k_len, k_len, r.randint(1, k_len), 1]), most_rows)
    if style in ("left", "right"):
        lengths = [r.choice([k_len, r.randint(0, k_len), r.randint(k_len // 2, k_len)]) for _ in range(batch)]
    kind = r.choice(numbers)
    dim = r.choice(DIMS)
    return Case(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, k_len=k_len, dim=dim,
        v_dim=r.choice([dim, r.choice(DIMS)]), dtype=r.choice(dtypes), sequences=style, lengths=lengths,
        preset=preset, overrides=overrides, numbers=kind, seed=seed,
        scale=r.choice([None, None, 0.25, 0.1] if kind == "normal" else [0.125, 1.0, 2.0]),
        layouts=(r.choice(LAYOUTS), r.choice(LAYOUTS), r.choice(LAYOUTS)), poison=r.random() < 0.7,
    )  # fmt: skip


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    numbers: tuple[str, ...] = ("normal",),
    presets: tuple[str, ...] = tuple(PRESETS),
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    sequences: tuple[str, ...] = ("whole", "left", "right", "packed"),
    odd_blocks: bool = True,
    work: int = 4000,
    cells: int = 150,
) -> Case:
    """Calls of at most about `work` (batch row, head, key) and `cells` (batch row, head, tile) triples, mostly cut.

    One seed decides a whole case: drawn field by field, hypothesis mostly varies one field of the case before.
    """
    return drawn(
        draw(st.integers(0, 2**SEED_BITS - 1)), numbers=numbers, presets=presets, dtypes=dtypes, sequences=sequences,
        odd_blocks=odd_blocks, work=work, cells=cells,
    )  # fmt: skip


def over(examples: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`@given(**strategies)` for a test that also takes the `engine` fixture, with that engine's number of examples."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            engine: Engine | None = fixtures.get("engine")
            count = (engine or Engine("reference")).examples(examples)

            def one(**values: Any) -> None:
                test(**fixtures, **values)

            # What hypothesis prints, and what it derives its draws from: every parameter of a test has others.
            one.__name__ = one.__qualname__ = re.sub(r"\W", "_", os.environ["PYTEST_CURRENT_TEST"])
            settings(max_examples=count)(given(**strategies)(one))()

        kept = [p for name, p in inspect.signature(test).parameters.items() if name not in strategies]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]  # what pytest reads for fixtures
        return run

    return wrap
