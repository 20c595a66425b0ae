"""Which compiled kernels a call launched, and what each took: warps, stages, sizes, registers, shared memory."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from ...spine.results import Facts


def _constants(compiled: Any) -> dict[str, int]:
    """The sizes that a kernel was compiled for, by argument."""
    source = getattr(compiled, "src", None)
    names = getattr(getattr(source, "fn", None), "arg_names", ())
    found = {names[at[0]]: value for at, value in getattr(source, "constants", {}).items() if at[0] < len(names)}
    return {name: value for name, value in found.items() if name.isupper() and isinstance(value, int)}


def _facts(name: str, launches: int, compiled: Any) -> Facts:
    metadata = compiled.metadata
    return {
        "kernel": name,
        "launches": launches,
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "shared_bytes": metadata.shared,
        "registers": compiled.n_regs,
        "spills": compiled.n_spills,
        "sizes": _constants(compiled),
    }


def by(call: Callable[[], Any]) -> list[Facts]:
    """Runs `call` and lists the kernels of ours that it launched; none where they are not compiled."""
    if importlib.util.find_spec("triton") is None:
        call()
        return []
    ours: Any = importlib.import_module("closecall.backends.triton.interpret").kernels(interpreted=False)
    hooks: Any = importlib.import_module("triton.knobs").runtime.launch_enter_hook
    seen: dict[Any, int] = {}

    def note(told: Any) -> None:
        handle = told.get()["function"]
        seen[handle] = seen.get(handle, 0) + 1

    hooks.add(note)
    try:
        call()
    finally:
        hooks.remove(note)
    return [
        _facts(name, seen[compiled.function], compiled)
        for name, kernel in sorted(vars(ours).items())
        for cache, *_ in getattr(kernel, "device_caches", {}).values()
        for compiled in cache.values()
        if compiled.function in seen
    ]
