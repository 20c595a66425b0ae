"""What the attention backends for CPU and CUDA have in common: a step's pages, and what makes a layer sparse."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.v1.attention.backend import AttentionType

from .. import paged
from ..pages import Pages
from ..policy import Policy
from ..ranking import AllHeads, alone
from .engine import scheduler_of
from .settings import RefusedError, Settings
from .stats import Stats


def layer_number(name: str) -> int:
    """12 of 'model.layers.12.self_attn.attn'."""
    found = re.findall(r"\.(\d+)\.", f".{name}.")
    return int(found[0]) if found else -1


def all_heads_of_the_layer(local: Tensor) -> tuple[Tensor, slice]:
    """Margins `[1, H, ...]` of all tensor-parallel ranks, in rank order, and which are this rank's."""
    rank, heads = get_tensor_model_parallel_rank(), local.shape[1]
    return tensor_model_parallel_all_gather(local.contiguous(), dim=1), slice(rank * heads, (rank + 1) * heads)


def wanted(worker: str) -> bool:
    """Whether the engine that is being made has a policy; raises where it lacks our other classes."""
    config = get_current_vllm_config()
    if Settings.read(config.additional_config) is None:
        return False
    scheduler = scheduler_of(config)
    if config.scheduler_config.scheduler_cls != scheduler or config.parallel_config.worker_cls != worker:
        raise RefusedError(
            "another platform plugin is active, so prompts would be cut anywhere: pass --scheduler-cls "
            f"{scheduler} --worker-cls {worker}"
        )
    return True


@dataclass(frozen=True)
class Step:
    """What our layers must know of a step beside vLLM's metadata."""

    pages: Pages
    decodes: bool  # one generated row for each sequence, and nothing else
    completes: bool  # some row is the last of a block


class StepBuilder:
    """A mixin for metadata builders: adds our step to vLLM's metadata, with the prompt lengths of our worker."""

    prompt_lens: Callable[[int], Tensor] | None = None
    min_context: int = 0
    block: int = 1  # of the policy

    def add_step(self, metadata: Any, starts: Tensor, lengths: Tensor) -> None:
        """Adds the step of sequences whose rows start at `starts [S + 1]` and that are `lengths [S]` long, both on the
        host. There is no step without a policy, nor for the made-up batches of a warm-up."""
        n = len(lengths)
        if self.prompt_lens is None or metadata.causal is not True or bool((lengths < starts.diff()).any()):
            return
        pages = Pages(metadata.block_table[:n], starts, lengths, self.prompt_lens(n).clone(), self.min_context)
        decodes = pages.bounds[-1] == n and all(p < k for p, k in zip(pages.prompts, pages.keys, strict=True))
        metadata.step = Step(pages, decodes, any(keys % self.block == 0 for keys in pages.keys))


class SparseLayer:
    """A mixin for attention implementations: the layer's policy and summaries, and the paged operator in place of
    vLLM's kernel."""

    able = False  # to be sparse
    stats: Stats | None = None  # of its worker
    policy: Policy | None = None  # None: the layer is vLLM's
    summaries: paged.PageSummaries | None = None
    decodes = False  # steps of nothing but decoding, too; else they are vLLM's
    _viewed: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # a cache, and its pages
    all_heads: AllHeads = staticmethod(alone)
    backend: str  # of the paged operator
    pages_of: Callable[[Tensor], tuple[Tensor, Tensor]]  # keys and values `[P, Hkv, page, D]`, views of vLLM's cache
    clock: Callable[[], float]
    # vLLM's:
    scale: float
    num_heads: int
    logits_soft_cap: float
    attn_type: str
    alibi_slopes: Any
    sinks: Any
    sliding_window: Any
    kv_cache_dtype: str
    kv_sharing_target_layer_name: str | None

    def prepare(self, name: str, layer: Any, settings: Settings) -> str | None:
        """Makes the layer sparse, or says why it stays vLLM's."""
        number = layer_number(name)
        why = self._why_not(layer, settings, number)
        if why is None:
            self.able, self.decodes = True, settings.decode == "closecall"
            try:
                self.use(settings.policy.for_layer(number))
            except ValueError as problem:  # tuned or calibrated for another model
                raise RefusedError(str(problem)) from problem
            if get_tensor_model_parallel_world_size() > 1:
                self.all_heads = all_heads_of_the_layer
        return why

    def use(self, policy: Policy | None) -> None:
        """Uses another policy from now on. The pages must be empty: it has no summaries of what they hold."""
        self.policy = policy
        self.summaries = None if policy is None else paged.PageSummaries(policy, self.backend)

    def _why_not(self, layer: Any, settings: Settings, number: int) -> str | None:
        if settings.layers is not None and number not in settings.layers:
            return "not among the layers asked for"
        if self.attn_type != AttentionType.DECODER:
            return f"attention of type {self.attn_type}"
        window = self.sliding_window[0] if isinstance(self.sliding_window, tuple) else self.sliding_window - 1
        if window >= 0:
            return f"a sliding window of {window + 1}"
        if self.alibi_slopes is not None:
            return "alibi"
        if self.sinks is not None:
            return "attention sinks"
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
            return f"a {self.kv_cache_dtype} cache"
        if self.kv_sharing_target_layer_name is not None:
            return "keys shared with another layer"
        return self._cannot(layer, settings)

    def _cannot(self, layer: Any, settings: Settings) -> str | None:
        """Why this machine or the cache's layout does not allow it."""
        raise NotImplementedError

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The cache's views. It stays the same for the engine's life, and six views of a tensor take their time."""
        if self._viewed is None or self._viewed[0] is not kv_cache:
            self._viewed = (kv_cache, self.pages_of(kv_cache))
        return self._viewed[1]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        start = self.clock()
        step: Step | None = getattr(attn_metadata, "step", None)
        rest = (attn_metadata, output, output_scale, output_block_scale)
        if step is None or self.policy is None:
            super().forward(layer, query, key, value, kv_cache, *rest)  # type: ignore[misc]
            if self.stats is not None:
                self.stats.add_vllm(self.clock() - start)
            return output
        rows, made = attn_metadata.num_actual_tokens, None
        q, out = query[:rows], output[:rows].view(rows, self.num_heads, -1)
        keys, values = self._pages(kv_cache)
        softcap = float(self.logits_soft_cap)
        if not step.decodes:
            _, made = paged.attention(
                q, keys, values, self.policy, step.pages, scale=self.scale, softcap=softcap, out=out,
                backend=self.backend, all_heads=self.all_heads, summaries=self.summaries, return_selection=True,
            )  # fmt: skip
        else:  # dense, whoever computes it
            if self.decodes:
                paged.attend(
                    q, keys, values, None, step.pages, block=self.policy.block, tile=self.policy.tile,
                    scale=self.scale, softcap=softcap, out=out, backend=self.backend,
                )  # fmt: skip
            else:
                super().forward(layer, query, key, value, kv_cache, *rest)  # type: ignore[misc]
            if step.completes and self.summaries is not None:
                self.summaries.update(q, keys, step.pages)
        if self.stats is not None:
            self.stats.add(made, rows, self.clock() - start)
        return output
