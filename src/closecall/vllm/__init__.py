"""The vLLM plugin: sparse prefill in the engine, over its own pages. See docs/vllm.md.

vLLM finds the two functions here by the entry points `vllm.general_plugins` and `vllm.platform_plugins`. Both change
nothing unless the engine is told a policy, by `--additional-config '{"closecall": {"policy": "auto"}}'` or by the
environment variable CLOSECALL_VLLM. Nothing of vLLM is patched: attention backend, scheduler, worker and platform are
classes of ours, derived from vLLM's and put where vLLM looks for such classes.
"""

from __future__ import annotations

CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"
CUDA_PLATFORM = "vllm.platforms.cuda.CudaPlatform"


def register() -> None:
    """Puts our attention backend in the place of vLLM's CPU one, where without a policy it hands out vLLM's own
    classes; on CUDA under the name CUSTOM, which has to be asked for."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "closecall.vllm.backend.Backend")
    elif current_platform.is_cuda():
        from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available

        kind = "Flash" if is_flash_attn_varlen_func_available() else "Triton"
        register_backend(AttentionBackendEnum.CUSTOM, f"closecall.vllm.cuda.{kind}Backend")


def platform() -> str | None:
    """Our platform where vLLM would take its plain CPU or CUDA one: it checks the settings before anything is
    loaded."""
    from vllm import platforms

    if platforms.cpu_platform_plugin() == CPU_PLATFORM:
        return "closecall.vllm.platform_cpu.Platform"
    if platforms.cuda_platform_plugin() == CUDA_PLATFORM:
        return "closecall.vllm.platform_cuda.Platform"
    return None
