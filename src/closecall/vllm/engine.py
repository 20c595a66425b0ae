"""What an engine must be for us, and the classes of ours that it gets. Needs none of vLLM's platforms."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from .settings import RefusedError, Settings

SCHEDULER = "closecall.vllm.scheduler.TileScheduler"
ASYNC_SCHEDULER = "closecall.vllm.scheduler.AsyncTileScheduler"
CPU_WORKER, OUR_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker", "closecall.vllm.worker.Worker"
GPU_WORKER, OUR_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker", "closecall.vllm.worker_cuda.Worker"


def scheduler_of(vllm_config: Any) -> str:
    """Our scheduler for this engine. On CPU vLLM never schedules ahead."""
    return ASYNC_SCHEDULER if vllm_config.scheduler_config.async_scheduling else SCHEDULER


def take_over(vllm_config: Any, settings: Settings, worker_cls: str, plain_worker: str) -> None:
    """Puts our scheduler and worker into an engine's configuration, or says why they cannot be there."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    scheduler_cls = scheduler_of(vllm_config)
    settings.check_engine(
        version=vllm.__version__,
        chunk=scheduler.max_num_batched_tokens,
        long_prefill=scheduler.long_prefill_token_threshold,
        sequences=scheduler.max_num_seqs,
        page=vllm_config.cache_config.block_size,
    )
    if scheduler.scheduler_cls not in (None, scheduler_cls):
        raise RefusedError(f"needs its own scheduler, and scheduler_cls is {scheduler.scheduler_cls}: leave it out")
    if parallel.worker_cls not in (plain_worker, worker_cls):
        raise RefusedError(f"needs its own worker, and worker_cls is {parallel.worker_cls}: leave it out")
    for name in ("kv_transfer_config", "speculative_config"):
        if getattr(vllm_config, name, None) is not None:
            raise RefusedError(f"{name} is set: keys that come from elsewhere have no summaries yet; leave it out")
    if max(parallel.decode_context_parallel_size, parallel.pipeline_parallel_size) > 1:
        raise RefusedError("context and pipeline parallelism are not supported: use tensor parallelism")
    scheduler.scheduler_cls, parallel.worker_cls = scheduler_cls, worker_cls


def on_cpu(vllm_config: Any) -> None:
    settings = Settings.read(vllm_config.additional_config)
    if settings is not None and vllm_config.model_config is not None:
        take_over(vllm_config, settings, OUR_CPU_WORKER, CPU_WORKER)


def on_cuda(vllm_config: Any) -> None:
    """Checks an engine on CUDA, where the user must ask for our backend."""
    settings = Settings.read(vllm_config.additional_config)
    if settings is None or vllm_config.model_config is None:
        return
    if vllm_config.attention_config.backend is not AttentionBackendEnum.CUSTOM:
        raise RefusedError("on CUDA it must be asked for: pass --attention-backend CUSTOM")
    if vllm_config.use_v2_model_runner:
        raise RefusedError("the V2 model runner does not tell prompt lengths: set VLLM_USE_V2_MODEL_RUNNER=0")
    cache = vllm_config.cache_config
    if not cache.user_specified_block_size:
        cache.block_size = settings.policy.tile
    take_over(vllm_config, settings, OUR_GPU_WORKER, GPU_WORKER)
