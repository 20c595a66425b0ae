"""Dense attention of others on a GPU: what ours is measured against, each under its own name."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from closecall.backends import flex
from closecall.checks import check_scale
from closecall.geometry import plan

from ...spine import inputs
from .device import Device
from .graphs import first_line

Run = Callable[[], Tensor]
SDPA = "sdpa"  # the only one of a CPU
FLASH, CUDNN, EFFICIENT, FA3, FLEX = "sdpa flash", "sdpa cudnn", "sdpa efficient", "fa3", "flex dense"
DENSE = (SDPA, FLASH, CUDNN, EFFICIENT, FA3, FLEX)  # names of rows
FA3_MODULE = "flash_attn_interface"


def _sdpa(kernel: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Run]:
    def make(q: Tensor, k: Tensor, v: Tensor) -> Run:
        def run() -> Tensor:
            with sdpa_kernel(kernel):  # an error rather than a fall back to a slow kernel
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

        return run

    return make


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> Run:
    """It takes float32, but knows no grouped heads: keys and values are repeated beforehand."""
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return _sdpa(SDPBackend.EFFICIENT_ATTENTION)(q, wide_k, wide_v)


def _fa3(q: Tensor, k: Tensor, v: Tensor) -> Run:
    if importlib.util.find_spec(FA3_MODULE) is None:
        raise RuntimeError(f"{FA3_MODULE} is not installed")
    module: Any = importlib.import_module(FA3_MODULE)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # views: it wants [B, N, H, D]

    def run() -> Tensor:
        made = module.flash_attn_func(q, k, v, causal=True)
        out: Tensor = made[0] if isinstance(made, tuple) else made  # with the log-sum-exp, in some releases
        return out.transpose(1, 2)

    return run


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Run:
    geometry = plan(1, q.shape[2], k.shape[2], 128, 128)  # FlexAttention's own grid
    return flex.compiled(q, k, v, None, geometry, check_scale(None, q.shape[3]))


MAKERS: dict[str, Callable[[Tensor, Tensor, Tensor], Run]] = {
    FLASH: _sdpa(SDPBackend.FLASH_ATTENTION),
    CUDNN: _sdpa(SDPBackend.CUDNN_ATTENTION),
    FA3: _fa3,
    FLEX: _flex,
}


def _try(name: str, make: Callable[..., Run], q: Tensor, k: Tensor, v: Tensor) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a kernel does not take these tensors
        if name != FLEX:  # which runs once when it is made
            make(*(x[:, :, : inputs.PROBE_KEYS] for x in (q, k, v)))()
        return make(q, k, v)


def there(q: Tensor, k: Tensor, v: Tensor, device: Device, compile_flex: bool) -> tuple[dict[str, Run], dict[str, str]]:
    """Those that run on these tensors, and of the others why not. A RuntimeError says why, where none runs."""
    if not device.is_gpu:
        return {SDPA: inputs.sdpa(q, k, v)[1]}, {}
    found: dict[str, Run] = {}
    missing: dict[str, str] = {}

    def attempt(name: str, make: Callable[..., Run]) -> None:
        try:
            found[name] = _try(name, make, q, k, v)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a foreign kernel, or a compiler, objects to: the others still run
            if device.is_lost():
                raise
            missing[name] = first_line(error)

    for name, make in MAKERS.items():
        if name != FLEX or compile_flex:
            attempt(name, make)
    if not {FLASH, CUDNN} & set(found):  # float32, say
        attempt(EFFICIENT, _efficient)
    if not found:
        why = "; ".join(f"{name}: {text}" for name, text in missing.items())
        raise RuntimeError(f"nobody's dense attention takes these tensors ({why}): try another --dtype")
    return found, missing
