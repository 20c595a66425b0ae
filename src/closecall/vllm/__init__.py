"""The vLLM plugin: sparse prefill in the engine, over its own pages. See docs/vllm.md.

vLLM finds the two functions here by the entry points `vllm.general_plugins` and `vllm.platform_plugins`. Both change
nothing unless the engine is told a policy, by `--additional-config '{"closecall": {"policy": "auto"}}'` or by the
environment variable CLOSECALL_VLLM. Nothing of vLLM is patched: attention backend, scheduler, worker and platform are
classes of ours, derived from vLLM's and put where vLLM looks for such classes.
"""

from __future__ import annotations

CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"


def register() -> None:
    """Puts our attention backend in the place of vLLM's CPU one; without a policy it hands out vLLM's own classes."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "closecall.vllm.backend.Backend")


def platform() -> str | None:
    """Our platform where vLLM would take its plain CPU one: it checks the settings before anything is loaded."""
    from vllm import platforms

    if platforms.cpu_platform_plugin() != CPU_PLATFORM:
        return None
    return "closecall.vllm.platform.Platform"
