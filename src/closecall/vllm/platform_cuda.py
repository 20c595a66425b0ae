"""vLLM's CUDA platform with the same additions. It can be imported only where vLLM was built for CUDA."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cuda import CudaPlatform

from .engine import on_cuda


class Platform(CudaPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        on_cuda(vllm_config)
