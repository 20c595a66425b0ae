"""Descriptors by which the copy engine of sm_90 and sm_100 (TMA) brings keys and values: a box of rows at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

ALIGNED = 16  # bytes


def of(k: Tensor, v: Tensor, keys: int, constants: dict[str, Any]) -> tuple[Any, Any] | None:
    """Those of `k` and `v [B, H, N, D]`, for `keys` rows at a time; None if the engine cannot read them.

    It takes whole slices of 16-bit numbers that lie side by side. All else must be a multiple of 16 bytes apart.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    if constants["TAIL"] or constants["V_TAIL"] or constants["SLICE"] or k.element_size() != 2:
        return None
    if (k.shape[3], v.shape[3]) != (constants["HEAD"], constants["V_PART"] * constants["V_PARTS"]):
        return None
    made = []
    for x, width in ((k, constants["HEAD"]), (v, constants["V_PART"])):
        # An axis of one place may have any stride: no step is ever taken along it.
        steps = [step if size > 1 else x.shape[3] for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
        apart = [step * x.element_size() for step in steps]
        if x.stride(3) != 1 or x.data_ptr() % ALIGNED or any(step <= 0 or step % ALIGNED for step in apart):
            return None
        made.append(TensorDescriptor(x, list(x.shape), [*steps, 1], [1, 1, keys, width]))
    return made[0], made[1]
