"""The same kernels under Triton's interpreter, beside the compiled ones in one process.

Triton decides when a kernel is defined whether it will be interpreted. So that one process can do both (our tests also
compile), the kernels' modules are loaded a second time under another package name with the interpreter asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MODULES = ("steps", "summaries", "pool", "sums", "scores", "again", "select", "attend", "few")


def kernels(interpreted: bool) -> SimpleNamespace:
    """All kernels by name."""
    modules = (
        _interpreted() if interpreted else [importlib.import_module(f"{__package__}.kernels.{m}") for m in MODULES]
    )
    found = {name: x for module in modules for name, x in vars(module).items() if name.endswith("_kernel")}
    return SimpleNamespace(**found)


@functools.cache
def _interpreted() -> list[ModuleType]:
    from triton.runtime.interpreter import InterpretedFunction  # type: ignore[import-untyped]

    import triton  # type: ignore[import-untyped]

    name = f"{__package__}.kernels_interpreted"
    here = Path(__file__).parent / "kernels"
    spec = importlib.util.spec_from_file_location(name, here / "__init__.py", submodule_search_locations=[str(here)])
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        modules = [importlib.import_module(f"{name}.{m}") for m in MODULES]
    for module in modules:
        for key, x in list(vars(module).items()):
            if isinstance(x, InterpretedFunction) and not key.endswith("_kernel"):
                # As plain functions: called through the interpreter, each call would patch Triton's language again.
                setattr(module, key, _INSTEAD[key] if key in _INSTEAD else x.rewrite())
    return modules


# Triton's own reductions were defined when triton was imported, so the interpreter cannot call them.
def _largest(x: Any, axis: int) -> Any:
    import triton.language as tl  # type: ignore[import-untyped]

    return tl.reduce(tl.where(x == x, x, -float("inf")), axis, tl.standard._elementwise_max)


def _smallest(x: Any, axis: int) -> Any:
    import triton.language as tl

    return tl.reduce(tl.where(x == x, x, float("inf")), axis, tl.standard._elementwise_min)


def _largest_int(x: Any, axis: int) -> Any:
    import triton.language as tl

    return tl.reduce(x, axis, tl.standard._elementwise_max)


def _total(x: Any, axis: int) -> Any:
    import triton.language as tl

    return tl.reduce(x, axis, tl.standard._sum_combine)


def _running(x: Any, axis: int) -> Any:
    import triton.language as tl

    return tl.associative_scan(x, axis, tl.standard._sum_combine)


# NumPy's maximum keeps NaN, a device's leaves it out.
def _larger(x: Any, y: Any) -> Any:
    import triton.language as tl

    return tl.where((x > y) | (y != y), x, y)


_INSTEAD = {
    "larger": _larger,
    "running": _running,
    "largest": _largest,
    "smallest": _smallest,
    "largest_int": _largest_int,
    "total": _total,
}
