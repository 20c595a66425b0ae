"""The attention backend: vLLM's cache and vLLM's kernels where we have nothing to say, the paged operator elsewhere."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from .. import paged
from ..backends import cpu
from ..pages import Pages
from ..policy import Policy
from ..ranking import AllHeads, alone
from .platform import SCHEDULER, WORKER
from .settings import RefusedError, Settings
from .stats import STATS


def layer_number(name: str) -> int:
    """12 of 'model.layers.12.self_attn.attn'."""
    found = re.findall(r"\.(\d+)\.", f".{name}.")
    return int(found[0]) if found else -1


class Backend(CPUAttentionBackend):
    """vLLM's own where no policy is set."""

    @staticmethod
    def get_impl_cls() -> Any:
        config = get_current_vllm_config()
        if Settings.read(config.additional_config) is None:
            return CPUAttentionBackendImpl
        if config.scheduler_config.scheduler_cls != SCHEDULER or config.parallel_config.worker_cls != WORKER:
            raise RefusedError(
                "another platform plugin is active, so prompts would be cut anywhere: pass --scheduler-cls "
                f"{SCHEDULER} --worker-cls {WORKER}"
            )
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder


@dataclass
class Metadata(CPUAttentionMetadata):
    pages: Pages | None = None
    decodes: bool = False  # one generated row for each sequence, and nothing else
    completes: bool = False  # some row is the last of a block


class Builder(CPUAttentionMetadataBuilder):
    """vLLM's metadata, and the step's pages with the prompt lengths that our worker knows."""

    prompt_lens: Callable[[int], Tensor] | None = None
    min_context: int = 0
    block: int = 1  # of the policy

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.prompt_lens is None or plain.causal is not True:
            return plain
        n = common_attn_metadata.num_reqs
        prompts = self.prompt_lens(n).clone()
        pages = Pages(
            plain.block_table[:n], plain.query_start_loc[: n + 1], plain.seq_lens[:n], prompts, self.min_context
        )
        decodes = pages.bounds[-1] == n and all(p < k for p, k in zip(pages.prompts, pages.keys, strict=True))
        completes = any(keys % self.block == 0 for keys in pages.keys)
        given = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
        return Metadata(**given, pages=pages, decodes=decodes, completes=completes)


def all_heads_of_the_layer(local: Tensor) -> tuple[Tensor, slice]:
    """Margins `[1, H, ...]` of all tensor-parallel ranks, in rank order, and which are this rank's."""
    rank, heads = get_tensor_model_parallel_rank(), local.shape[1]
    return tensor_model_parallel_all_gather(local.contiguous(), dim=1), slice(rank * heads, (rank + 1) * heads)


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


class Impl(CPUAttentionBackendImpl):
    """The paged operator over vLLM's cache; vLLM's own kernel in layers that cannot be sparse."""

    able = False  # to be sparse
    policy: Policy | None = None  # None: the layer is vLLM's
    summaries: paged.PageSummaries | None = None
    all_heads: AllHeads = staticmethod(alone)

    def prepare(self, name: str, layer: Any, settings: Settings) -> str | None:
        """Makes the layer sparse, or says why it stays vLLM's."""
        number = layer_number(name)
        why = self._why_not(layer, settings, number)
        if why is None:
            self.able = True
            self.use(settings.policy.for_layer(number))
            if get_tensor_model_parallel_world_size() > 1:
                self.all_heads = all_heads_of_the_layer
        return why

    def use(self, policy: Policy | None) -> None:
        """Another policy from now on, on pages that hold nothing: it has no summaries of what is there."""
        self.policy = policy
        self.summaries = None if policy is None else paged.PageSummaries(policy)

    def _why_not(self, layer: Any, settings: Settings, number: int) -> str | None:
        if settings.layers is not None and number not in settings.layers:
            return "not among the layers asked for"
        if self.attn_type != AttentionType.DECODER:
            return f"attention of type {self.attn_type}"
        if self.sliding_window != -1:
            return f"a sliding window of {self.sliding_window}"
        if self.alibi_slopes is not None:
            return "alibi"
        if self.sinks is not None:
            return "attention sinks"
        if self.is_fp8_kv_cache:
            return f"a {self.kv_cache_dtype} cache"
        if self.kv_sharing_target_layer_name is not None:
            return "keys shared with another layer"
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

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        start = time.perf_counter()
        if not isinstance(attn_metadata, Metadata) or attn_metadata.pages is None or self.policy is None:
            rest = (attn_metadata, output, output_scale, output_block_scale)
            super().forward(layer, query, key, value, kv_cache, *rest)
            STATS.totals.vllm_seconds += time.perf_counter() - start
            return output
        rows = attn_metadata.num_actual_tokens
        keys, values = key_pages(kv_cache)
        if attn_metadata.decodes:  # dense for both, and vLLM's kernel is the faster one for single rows
            rest = (attn_metadata, output, output_scale, output_block_scale)
            super().forward(layer, query, key, value, kv_cache, *rest)
            if attn_metadata.completes and self.summaries is not None:
                self.summaries.update(query[:rows], keys, attn_metadata.pages)
            STATS.add(None, rows, time.perf_counter() - start)
            return output
        _, made = paged.attention(
            query[:rows], keys, values, self.policy, attn_metadata.pages,
            scale=self.scale, softcap=float(self.logits_soft_cap), out=output[:rows].view(rows, self.num_heads, -1),
            all_heads=self.all_heads, summaries=self.summaries, return_selection=True,
        )  # fmt: skip
        STATS.add(made, rows, time.perf_counter() - start)
        return output
