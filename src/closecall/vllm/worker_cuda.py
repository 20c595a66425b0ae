"""vLLM's GPU worker with our part of it."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from .worker import Told


class Worker(Told, GPUWorker):
    pass
