"""vLLM's CPU platform, which also checks our settings before anything is loaded, and brings our classes in."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.platforms.cpu import CpuPlatform

from .settings import RefusedError, Settings

SCHEDULER = "closecall.vllm.scheduler.TileScheduler"
WORKER = "closecall.vllm.worker.Worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


class Platform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        settings = Settings.read(vllm_config.additional_config)
        if settings is None or vllm_config.model_config is None:
            return
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        settings.check_engine(
            version=vllm.__version__,
            chunk=scheduler.max_num_batched_tokens,
            long_prefill=scheduler.long_prefill_token_threshold,
            sequences=scheduler.max_num_seqs,
            page=vllm_config.cache_config.block_size,
        )
        if scheduler.scheduler_cls not in (None, SCHEDULER):
            raise RefusedError(f"needs its own scheduler, and scheduler_cls is {scheduler.scheduler_cls}: leave it out")
        if parallel.worker_cls not in (CPU_WORKER, WORKER):
            raise RefusedError(f"needs its own worker, and worker_cls is {parallel.worker_cls}: leave it out")
        for name in ("kv_transfer_config", "speculative_config"):
            if getattr(vllm_config, name, None) is not None:
                raise RefusedError(f"{name} is set: keys that come from elsewhere have no summaries yet; leave it out")
        if max(parallel.decode_context_parallel_size, parallel.pipeline_parallel_size) > 1:
            raise RefusedError("context and pipeline parallelism are not supported: use tensor parallelism")
        scheduler.scheduler_cls, parallel.worker_cls = SCHEDULER, WORKER
