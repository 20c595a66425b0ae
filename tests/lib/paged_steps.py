"""Steps of an engine: sequences on pages in any order and layout."""

from __future__ import annotations

import dataclasses

import torch

from closecall import paged


def make_pages(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same pages `[P, Hkv, page, D]` in another order in memory."""
    if layout == "rows":
        return x.contiguous()
    if layout == "across":  # vLLM's keys on CPU: neighbouring keys side by side
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.randn(x.shape[0], x.shape[2], 2, x.shape[1], x.shape[3]).to(
        x.dtype
    )  # FlashAttention's, K and V in one
    wide[:, :, 0] = x.transpose(1, 2)
    return wide[:, :, 0].transpose(1, 2)


@dataclasses.dataclass
class Step:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: paged.Pages


def make_step(
    seed: int, lengths: list[tuple[int, int]], page: int, heads: tuple[int, int], dims: tuple[int, int],
    dtype: torch.dtype = torch.float32, layouts: tuple[str, str] = ("rows", "rows"), prompts: list[int] | None = None,
) -> Step:  # fmt: skip
    """Sequences of (rows, keys) on randomly ordered pages; table entries past the end point nowhere."""
    gen = torch.Generator().manual_seed(seed)
    needed = [-(-keys // page) for _, keys in lengths]
    n_pages, width = sum(needed) + 3, max(needed) + 1
    order = torch.randperm(n_pages, generator=gen).tolist()
    table = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    for i, n in enumerate(needed):
        table[i, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
    draw = lambda *shape: torch.randn(*shape, generator=gen).to(dtype)  # noqa: E731
    k = make_pages(draw(n_pages, heads[1], page, dims[0]), layouts[0])
    v = make_pages(draw(n_pages, heads[1], page, dims[1]), layouts[1])
    rows = [r for r, _ in lengths]
    cu = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    prompt_lens = None if prompts is None else torch.tensor(prompts)
    pages = paged.Pages(table, cu, torch.tensor([n for _, n in lengths], dtype=torch.int32), prompt_lens)
    return Step(draw(sum(rows), heads[0], dims[0]), k, v, pages)
