"""The quicker interpreter that the tests run kernels on takes the steps that Triton's own takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import closecall
from engines import Engine

pytest.importorskip("triton")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.own)


def attention(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads, masks, sums, products, casts and sorts: most of what kernels do."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 40, 16, dtype=dtype) for _ in range(3))
    policy = closecall.policy("quest", block=8, tile=16, budget=4, tile_factor=1)
    found: tuple[torch.Tensor, torch.Tensor] = Engine("triton").attention(q, k, v, policy, return_lse=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    quick = attention(dtype)
    request.getfixturevalue("own")
    for mine, theirs in zip(quick, attention(dtype), strict=True):
        assert torch.equal(mine, theirs)


def types() -> list[Any]:
    from triton.language import core

    scalars = [core.dtype(name) for name in ("int1", "int8", "uint8", "int32", "int64", "fp16", "bf16", "fp32")]
    pointers = [core.pointer_type(core.float32), core.pointer_type(core.int8)]
    return scalars + pointers + [core.block_type(x, s) for x in scalars + pointers for s in ([4], [2, 8], [8, 2])]


def told() -> list[Any]:
    """All that a type says about its tensors, while a kernel runs; twice, for what is remembered."""
    from triton.language import core
    from triton.runtime import interpreter

    from closecall.backends.triton import interpret

    scope = interpreter._patch_lang(interpret.kernels(True).attend_kernel.fn)
    try:
        found = []
        for dtype in types() * 2:
            x = core.tensor("a handle", dtype)
            shape = [size.value for size in x.shape]
            found.append((str(x.type), str(x.dtype), shape, x.numel.value, x.handle, interpreter._get_np_dtype(dtype)))
        found.append([[a == b for a in types()] for b in types()])
    finally:
        scope.restore()
    return found


def test_types_say_the_same(request: pytest.FixtureRequest) -> None:
    quick = told()
    request.getfixturevalue("own")
    assert quick == told()


def test_what_is_compiled_meets_triton_as_it_is() -> None:
    from triton.language import core
    from triton.runtime import interpreter

    before = core.tensor.__init__, core.block_type.__init__, core.dtype.__eq__, interpreter.interpreter_builder.options
    attention(torch.float32)
    after = core.tensor.__init__, core.block_type.__init__, core.dtype.__eq__, interpreter.interpreter_builder.options
    assert before == after
    assert {x.__module__ for x in after[:3]} == {"triton.language.core"}
