"""Host code between kernels, seen as a device would see it: nothing but launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from closecall.backends.triton import interpret


class NoSync(torch.overrides.TorchFunctionMode):
    """Fails where a tensor is read by the host, or a shape depends on numbers: what a captured graph cannot do."""

    ASKING = ("item", "tolist", "nonzero", "masked_select", "unique", "__bool__", "__int__", "__float__", "__index__",
              "cpu", "numpy", "equal", "argwhere", "is_nonzero", "repeat_interleave")  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        asks = name in self.ASKING
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            asks = any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)
        assert not asks, f"{name} asks the device"
        return func(*args, **kwargs or {})


class Launched:
    """A kernel whose interpretation does ask, because it computes on the host."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            with torch._C.DisableTorchFunction():
                self.kernel[grid](*args, **kwargs)

        return run


def launched(interpreted: bool = True) -> SimpleNamespace:
    """All kernels, to put in the place of `interpret.kernels` under `NoSync`."""
    return SimpleNamespace(**{name: Launched(kernel) for name, kernel in vars(interpret.kernels(True)).items()})
