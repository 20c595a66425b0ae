"""The attention backend: vLLM's cache and vLLM's kernels where we have nothing to say, the paged operator elsewhere."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from ..backends import cpu
from .engine import OUR_CPU_WORKER
from .layers import SparseLayer, StepBuilder, wanted
from .settings import Settings


class Backend(CPUAttentionBackend):
    """vLLM's own where no policy is set."""

    @staticmethod
    def get_impl_cls() -> Any:
        if not wanted(OUR_CPU_WORKER):
            return CPUAttentionBackendImpl
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder


class Builder(StepBuilder, CPUAttentionMetadataBuilder):
    """vLLM's metadata, and our step."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        n = common_attn_metadata.num_reqs
        self.add_step(plain, plain.query_start_loc[: n + 1], plain.seq_lens[:n])
        return plain


def key_pages(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """`[P, Hkv, page, D]` of keys and values, as views of vLLM's cache `[P, Hkv, page, 2 D]`.

    The first half of a page and head holds the keys as [D, page], the second the values as [page, D].
    """
    n, heads, page, width = kv_cache.shape
    both = kv_cache.view(n, heads, 2, page * width // 2)
    keys = torch.unflatten(both[:, :, 0], 2, (width // 2, page)).transpose(2, 3)
    return keys, torch.unflatten(both[:, :, 1], 2, (page, width // 2))


def layout_is_known(isa: str, heads: int, page: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether keys and values that vLLM writes are found where `key_pages` looks for them."""
    cache = torch.zeros(3, heads, page, 2 * dim, dtype=dtype)
    k, v = (torch.arange(page * heads * dim).remainder(251).view(page, heads, dim).to(dtype) + i for i in (0, 1))
    slots = torch.randperm(page) + page  # the second page, in any order
    halves = cache.view(3, heads, 2 * page, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    keys, values = key_pages(cache)
    place = slots - page
    return torch.equal(keys[1][:, place], k.transpose(0, 1)) and torch.equal(values[1][:, place], v.transpose(0, 1))


class Impl(SparseLayer, CPUAttentionBackendImpl):
    """The paged operator over vLLM's cache; vLLM's own kernel in layers that cannot be sparse."""

    backend = "cpu"
    pages_of = staticmethod(key_pages)
    clock = staticmethod(time.perf_counter)

    def _cannot(self, layer: Any, settings: Settings) -> str | None:
        if not cpu.tiers():
            return "closecall was built without its native module: install a C++ compiler and reinstall"
        cache = layer.kv_cache
        if cache.dtype not in cpu._DTYPES:
            return f"no kernel for {cache.dtype}"
        if not layout_is_known(layer.isa, self.num_kv_heads, cache.shape[2], self.head_size, cache.dtype):
            return f"the cache layout of vLLM's {layer.isa!r} kernels"
        if cache.shape[2] % settings.policy.block:
            return f"pages of {cache.shape[2]} tokens hold no whole blocks of {settings.policy.block}"
        return None
