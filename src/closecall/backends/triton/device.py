"""Where Triton kernels run: what a device or a tensor lacks, its entry in the launch table, and the kernels for it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...geometry import Geometry
from ...selection import Selection
from . import launch, tuning
from .interpret import kernels

OLDEST_TRITON = (3, 5)  # as the extra `triton` asks for


@functools.cache
def installed_problem() -> str | None:
    """What is wrong with the triton that is installed; None if nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # torch for ROCm brings it in a package of another name
        found = importlib.import_module("triton").__version__
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"triton {found} is older than {oldest}: pip install -U triton"
    return None


def interpreting() -> bool:
    import triton  # type: ignore[import-untyped]

    return bool(triton.knobs.runtime.interpret)


def why_not(q: Tensor) -> str | None:
    if installed_problem() is not None:
        other = "cpu" if q.device.type == "cpu" else "flex"
        return f"{installed_problem()}, or use backend={other!r}"
    if q.device.type == "cpu":
        if not interpreting():
            return (
                "Triton kernels run on cuda devices, not on cpu: use backend='cpu', or TRITON_INTERPRET=1 to check them"
            )
    elif q.device.type != "cuda":
        return f"Triton kernels run on cuda devices, not on {q.device.type}: use backend='reference'"
    else:
        problem = _device_problem(q.device)
        if problem is not None:
            return problem
    if q.dtype not in launch.DTYPES:
        return f"no Triton kernel for {q.dtype}: use float32, bfloat16 or float16, or backend='reference'"
    return dim_problem("head", q.shape[-1])


def dim_problem(kind: str, dim: int) -> str | None:
    if dim > launch.LARGEST_DIM:
        return f"no Triton kernel for {kind} dim {dim}, the largest is {launch.LARGEST_DIM}: use backend='flex'"
    return None


def _device_problem(device: torch.device) -> str | None:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        if not properties.gcnArchName.startswith("gfx9"):
            return f"Triton kernels need a CDNA device (gfx9), not {properties.gcnArchName}: use backend='flex'"
    elif properties.major < 8:
        return (
            f"Triton kernels need compute capability 8.0, not {properties.major}.{properties.minor}: use backend='flex'"
        )
    return None


def arch(device: torch.device) -> str:
    """The launch table's entry for a device."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return "sm_80"  # under the interpreter any entry does
    if torch.version.hip:
        return "gfx942"
    properties = torch.cuda.get_device_properties(device)
    return launch.arch(properties.major, properties.minor)


def call(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection | None = None, paged: Geometry | None = None
) -> tuning.Call:
    """What a kernel's launch is chosen by; where `k` holds `paged` keys, the longest sequence counts."""
    return tuning.Call(
        kernel, arch(q.device), q.shape[3], v.shape[3], q.dtype, _device_name(q.device), q.shape[0], q.shape[1],
        k.shape[1], q.shape[2], k.shape[2] if paged is None else paged.n_blocks * paged.block,
        0 if selection is None else selection.lists.shape[3],
    )  # fmt: skip


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@contextlib.contextmanager
def running(device: torch.device) -> Iterator[Any]:
    """The kernels for a device, which is made the current one; under the interpreter, NumPy's warnings are silenced."""
    if device.type == "cpu":
        with np.errstate(all="ignore"):
            yield kernels(interpreted=True)
    else:
        with torch.cuda.device(device):
            yield kernels(interpreted=False)


def wide(q: Tensor) -> bool:
    """Whether products are made in float32 whatever the type: under the interpreter, which cannot multiply bfloat16."""
    return q.device.type == "cpu"
