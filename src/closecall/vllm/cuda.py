"""The attention backend for CUDA: vLLM's cache, and vLLM's kernels where we have nothing to say.

It is registered as CUSTOM, and derived from vLLM's FlashAttention backend or from its Triton one. Both keep one cache
`[pages, heads, page, 2 dim]`, in which a token's key and value lie side by side, and write it before attention runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from ..backends import load
from ..backends.triton.paged import has_kernel
from ..policy import Policy
from .engine import OUR_GPU_WORKER
from .layers import SparseLayer, StepBuilder, wanted
from .settings import RefusedError, Settings


def key_pages(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """`[P, Hkv, page, D]` of keys and values, as views of vLLM's cache `[P, Hkv, page, 2 D]`."""
    keys, values = kv_cache.chunk(2, dim=-1)
    return keys, values


class _Backend:
    """What ours says differently from the backend that it is derived from."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Those of vLLM's that hold whole blocks."""
        config = get_current_vllm_config_or_none()
        settings = None if config is None else Settings.read(config.additional_config)
        block = 64 if settings is None else settings.policy.block
        theirs = super().get_supported_kernel_block_sizes(kv_cache_spec)  # type: ignore[misc]
        exact = [size for size in theirs if isinstance(size, int)]
        if exact:
            return [size for size in exact if size % block == 0]
        return [MultipleOf(math.lcm(block, *(size.base for size in theirs)))]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        sizes = [s if isinstance(s, int) else s.base for s in cls.get_supported_kernel_block_sizes()]
        return block_size is None or any(block_size % size == 0 for size in sizes)


def _checked() -> None:
    """Raises unless the engine that is being made is one of ours: whoever asks for CUSTOM asks for a policy."""
    if not wanted(OUR_GPU_WORKER):
        raise RefusedError(
            "attention backend CUSTOM needs a policy: pass --additional-config "
            '\'{"closecall": {"policy": "auto"}}\', or another --attention-backend'
        )


class _Builder(StepBuilder):
    """vLLM's metadata, and our step.

    What a step keeps is counted on the host, so no graph can hold our attention: vLLM leaves it out of its graphs and
    captures the pieces between (`PIECEWISE`).
    """

    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False  # a step's pages are of one block table

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        plain = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        lengths = common.seq_lens_cpu_upper_bound  # exact, for there is no speculative decoding
        lengths = common.seq_lens.cpu() if lengths is None else lengths
        self.add_step(plain, common.query_start_loc_cpu[: common.num_reqs + 1], lengths[: common.num_reqs])
        return plain


class _Impl(SparseLayer):
    """The paged operator over vLLM's cache; vLLM's own kernel in layers that cannot be sparse."""

    backend = "triton"
    pages_of = staticmethod(key_pages)

    @staticmethod
    def clock() -> float:
        return 0.0  # the host does not wait for the device: its clock would tell nothing of attention

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def _cannot(self, layer: Any, settings: Settings) -> str | None:
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        if getattr(model, "is_mm_prefix_lm", False):
            return "tokens that see later ones (a prefix LM)"
        if getattr(model, "rswa_window", None) is not None:
            return "reference sliding windows"
        if getattr(self, "chunk_lookback", -1) != -1:
            return "chunked local attention"
        keys, _ = key_pages(layer.kv_cache)
        problem = load("triton").why_not(keys[:1, :, :1])
        if problem is not None:
            return problem
        policy = settings.policy
        if policy.rule.needs_scores and not has_kernel(policy, keys.shape[3]):
            return f"no Triton kernel that ranks blocks as {policy.name!r} does"
        if keys.shape[2] % settings.policy.block:
            return f"pages of {keys.shape[2]} tokens hold no whole blocks of {settings.policy.block}"
        return None

    def prepare(self, name: str, layer: Any, settings: Settings) -> str | None:
        why = super().prepare(name, layer, settings)
        if why is None and self.summaries is not None and self.policy is not None:
            self._reserve(self.policy, layer.kv_cache)
        return why

    def _reserve(self, policy: Policy, kv_cache: Tensor) -> None:
        """Takes the memory of the summaries now: later there may be none."""
        assert self.summaries is not None
        keys, _ = key_pages(kv_cache)
        try:
            self.summaries.reserve(keys, self.num_heads)
        except torch.OutOfMemoryError as error:
            raise RefusedError(
                f"no memory left for the block summaries of {keys.shape[0]} pages ({error}): pass a lower "
                "--gpu-memory-utilization"
            ) from error


class FlashBuilder(_Builder, FlashAttentionMetadataBuilder):
    pass


class FlashImpl(_Impl, FlashAttentionImpl):
    pass


class FlashBackend(_Backend, FlashAttentionBackend):
    """Derived from FlashAttention's."""

    @staticmethod
    def get_impl_cls() -> Any:
        _checked()
        return FlashImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return FlashBuilder


class TritonBuilder(_Builder, TritonAttentionMetadataBuilder):
    pass


class TritonImpl(_Impl, TritonAttentionImpl):
    pass


class TritonBackend(_Backend, TritonAttentionBackend):
    """Derived from vLLM's Triton backend: where there is no FlashAttention, and for float32."""

    @staticmethod
    def get_impl_cls() -> Any:
        _checked()
        return TritonImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return TritonBuilder
