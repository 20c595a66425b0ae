"""Triton's interpreter, made quicker: it works out again for every step what depends on a type alone.

The same steps on the same numbers, at about half the time. What is remembered is what Triton's own functions gave the
first time. `test_interpreter.py` holds both against each other.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any


def _by_name(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a type, remembered by the type's name, which tells all about it."""
    found: dict[str, Any] = {}

    def quick(dtype: Any) -> Any:
        name = dtype.name
        if name not in found:
            found[name] = own(dtype)
        return found[name]

    return quick


def _tensor_init(own: Callable[..., None]) -> Callable[..., None]:
    """A tensor's shape and number of elements follow from its type."""
    found: dict[str, tuple[Any, Any]] = {}

    def quick(self: Any, handle: Any, kind: Any) -> None:
        if (known := found.get(kind.name)) is None:
            own(self, handle, kind)
            found[kind.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = known

    return quick


def _block_init(own: Callable[..., None]) -> Callable[..., None]:
    """What a type of blocks says follows from its elements' type and its shape."""
    found: dict[tuple[str, tuple[Any, ...]], tuple[Any, Any, str]] = {}

    def quick(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if (known := found.get(key)) is None:
            own(self, element_ty, shape)
            found[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    return quick


def _computation_type(own: Callable[..., Any]) -> Callable[..., Any]:
    """What two types are computed in follows from them, from which is a plain number's, and from the operation."""
    found: dict[tuple[Any, ...], Any] = {}

    def quick(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in found:
            found[key] = own(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return found[key]

    return quick


def _broadcast(own: Callable[..., Any]) -> Callable[..., Any]:
    """Two blocks of one shape stay as they are, and so do two scalars."""

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        both = one.is_block() + other.is_block()
        if both == 0 or (both == 2 and one.shape.values == other.shape.values):
            return lhs, rhs
        return own(self, lhs, rhs)

    return quick


def _same(own: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or own(self, other)


def quicken() -> None:
    """Once for this process, and only while a kernel is interpreted: what is compiled meets Triton as it is."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.language import core, semantic
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "own"):
        return
    builder, meaning = interpreter.interpreter_builder, semantic.TritonSemantic
    changes: list[tuple[Any, str, Any]] = [
        (interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype)),
        (core.tensor, "__init__", _tensor_init(core.tensor.__init__)),
        (core.block_type, "__init__", _block_init(core.block_type.__init__)),
        (core.dtype, "__eq__", _same(core.dtype.__eq__)),
        (meaning, "computation_type_impl", _computation_type(meaning.computation_type_impl)),
        (meaning, "broadcast_impl_value", _broadcast(meaning.broadcast_impl_value)),
    ]
    if not builder.options.debug:  # then it looks for overflows in 64 bits, and keeps what it saw to itself
        changes.append((builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)))
    own = interpreter._patch_lang

    def patch_lang(fn: Any) -> Any:
        scope = own(fn)
        for change in changes:
            scope.set_attr(*change)
        return scope

    patch_lang.own = own  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang
