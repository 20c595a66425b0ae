"""vLLM's scheduler, cutting prompts at tiles: a tile cut in two would be decided twice, by half its rows each."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .settings import RefusedError, Settings, aligned


class TileScheduler(Scheduler):
    """Ends chunks of prompts at multiples of the policy's tile, and leaves everything else to vLLM.

    vLLM has the hook because Mamba layers need the same: chunks that end on a grid.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = Settings.read(self.vllm_config.additional_config)
        if settings is None or self.has_mamba_layers:
            raise RefusedError("a model with Mamba layers cuts its prompts on a grid of its own: not supported")
        self.need_mamba_block_aligned_split = True
        self.tile = settings.policy.tile

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return aligned(start, num_new_tokens, request.num_prompt_tokens, self.tile)


class AsyncTileScheduler(TileScheduler, AsyncScheduler):
    """For engines that schedule a step while the one before runs, as vLLM does on GPUs."""
