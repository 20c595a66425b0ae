"""vLLM's CPU platform, which also checks our settings before anything is loaded, and brings our classes in."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from .engine import on_cpu


class Platform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        on_cpu(vllm_config)
