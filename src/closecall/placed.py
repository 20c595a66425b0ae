"""What is made of a plan on the host and read on a device: made once, there before any stream reads it, and kept for
as long as the plan lives, or a CUDA graph that reads it may be replayed.

A tensor that the device itself would compute is ready for the stream that asked first and for no other, and what a
call computes while it is captured lies in the graph's own memory. So nothing that outlives a call is computed there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from .geometry import Geometry

Made = TypeVar("Made")

# By plan, for as long as the plan lives: `geometry.plan` remembers those in use.
_made: weakref.WeakKeyDictionary[Geometry, dict[tuple[torch.device, Hashable], Any]] = weakref.WeakKeyDictionary()
# By identity, what a CUDA graph has captured. It reads that whenever it is replayed and does not say when it is gone,
# so it stays: some dozens of bytes per tile and captured plan.
_captured: dict[int, Any] = {}


def placed(geometry: Geometry, device: torch.device, what: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` made of this plan for this device, now or at an earlier call.

    `what` names all that it depends on beside the plan. `make` computes on the host and uploads with `Tensor.to`, not
    `non_blocking`: the host goes on when it is there.
    """
    here = _made.setdefault(geometry, {})
    at = (device, what)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if at not in here:
        if capturing:
            raise RuntimeError(
                f"a CUDA graph is being captured, and the plan of this call (B = {geometry.batch}, "
                f"M = {geometry.q_len}, N = {geometry.k_len}) is not on {device} yet: make the call once before capture"
            )
        here[at] = make()
    made: Made = here[at]
    if capturing:
        _captured[id(made)] = made
    return made
