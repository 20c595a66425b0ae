"""Keys and values by the copy engine: the same bits as through pointers, under the interpreter, and pointers where it
cannot read a tensor."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import closecall
from closecall import paged
from closecall.backends.triton import attending, boxes, launch, tuning

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The descriptors that calls made, None where they made none."""
    seen: list[Any] = []
    of = boxes.of
    monkeypatch.setattr(boxes, "of", lambda *args: seen.append(of(*args)) or seen[-1])
    return seen


def both(monkeypatch: pytest.MonkeyPatch, q: Any, k: Any, v: Any, policy: str, **options: Any) -> tuple[Any, Any]:
    """The outputs and log-sum-exps through pointers and through boxes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = []
    for tma in (False, True):
        monkeypatch.setenv("CLOSECALL_LAUNCH", json.dumps({name: {"tma": tma} for name in ("attend", "packed")}))
        found.append(closecall.attention(q, k, v, policy, backend="triton", return_lse=True, **options))
    return found[0], found[1]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tensors(dtype: torch.dtype, keys: int = 70, dim: int = 16, heads: int = 2, kv_heads: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(keys)
    return [torch.randn(1, h, keys, dim).to(dtype) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "policy", ["dense", "topk:budget=2,block=16,tile=16", "topk:budget=2,block=16,tile=16,share=group"]
)
def test_boxes_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, made: list[Any], dtype: torch.dtype, policy: str
) -> None:
    pointers, boxed = both(monkeypatch, *tensors(dtype), policy)
    assert [x is not None for x in made] == [True]
    assert same(pointers, boxed)


def test_packed_sequences_begin_anywhere(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    """A box begins at any key, also at one that is no multiple of a block; other strides, as models' tensors have."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(torch.float16, heads=4, kv_heads=2))
    pointers, boxed = both(monkeypatch, q, k, v, "topk:budget=2,block=16,tile=16", cu_seqlens=torch.tensor([0, 21, 70]))
    assert [x is not None for x in made] == [True]
    assert same(pointers, boxed)


@pytest.mark.parametrize("what", ["an odd address", "odd strides", "a column apart", "float32", "two slices"])
def test_what_the_engine_cannot_read_goes_through_pointers(
    monkeypatch: pytest.MonkeyPatch, made: list[Any], what: str
) -> None:
    q, k, v = tensors(torch.float16, keys=40, dim=48 if what == "two slices" else 16)
    if what == "an odd address":
        k = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    elif what == "odd strides":
        k = torch.zeros(1, 1, 40, 17, dtype=k.dtype)[..., :16].copy_(k)
    elif what == "a column apart":
        k = torch.zeros(1, 1, 40, 32, dtype=k.dtype)[..., ::2].copy_(k)
    elif what == "float32":
        q, k, v = (x.float() for x in (q, k, v))
    pointers, boxed = both(monkeypatch, q, k, v, "dense")
    assert made == [None]
    assert same(pointers, boxed)


def test_an_axis_of_one_place_may_have_any_stride() -> None:
    k = torch.zeros(64, 128, dtype=torch.bfloat16).as_strided((1, 1, 64, 128), (7, 3, 128, 1))
    constants = {"TAIL": 0, "V_TAIL": 0, "SLICE": 0, "HEAD": 128, "V_PART": 64, "V_PARTS": 2}
    found = boxes.of(k, k, 32, constants)
    assert found is not None
    assert [x.block_shape for x in found] == [[1, 1, 32, 128], [1, 1, 32, 64]]
    assert found[0].strides[2:] == [128, 1]
    two = k.as_strided((2, 1, 32, 128), (0, 3, 128, 1))  # expanded: the engine takes no step of 0
    assert boxes.of(two, two, 32, constants) is None


def test_pages_go_through_pointers(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CLOSECALL_LAUNCH", '{"attend": {"tma": true}}')
    q, k, v = tensors(torch.float16, keys=32)
    pages = paged.Pages(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0, 32]), torch.tensor([32]))
    at = [x.view(1, 2, 16, 16).transpose(0, 1).contiguous() for x in (k, v)]
    out = paged.attention(q[0].transpose(0, 1), *at, "dense:block=16,tile=16", pages, backend="triton")
    assert made == []
    assert torch.equal(
        out.transpose(0, 1)[None], closecall.attention(q, k, v, "dense:block=16,tile=16", backend="triton")
    )


# --- Who may be launched so ------------------------------------------------------------------------------------------


def test_where_boxes_are_better_on_paper() -> None:
    may = {
        (arch, dim) for arch in launch.ARCHS for dim in (64, 96, 128, 192, 256) if launch.boxes(arch, dim, dim, "bf16")
    }
    assert may == {(arch, dim) for arch in ("sm_90", "sm_100") for dim in (128, 256)}
    assert not launch.boxes("sm_90", 128, 128, "fp32")
    assert not launch.boxes("sm_90", 192, 128, "bf16")


def test_the_table_waits_for_a_device_to_time_it() -> None:
    assert not any(
        launch.table("attend", arch, dim, dim, "bf16").tma for arch in launch.ARCHS for dim in (64, 128, 256)
    )


def test_tuning_tries_it_where_it_may() -> None:
    call = tuning.Call("attend", "sm_90", 128, 128, torch.bfloat16)
    tried = tuning.candidates(call.start, call.tma)
    assert sum(one.tma for one in tried) == len(tried) / 2
    assert len(set(tried)) == len(tried)
    for kernel, arch in (("few", "sm_90"), ("attend", "sm_80"), ("scores", "sm_100")):
        assert not tuning.Call(kernel, arch, 128, 128, torch.bfloat16).tma


def test_a_bad_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOSECALL_LAUNCH", '{"attend": {"tma": 2}}')
    with pytest.raises(ValueError, match="launch field tma must be true or false, got 2"):
        tuning.choose(tuning.Call("attend", "sm_90", 128, 128, torch.bfloat16))


def test_the_backend_asks_for_boxes_by_the_launch(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    """Nobody asks the engine where the launch does not say so."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    closecall.attention(*tensors(torch.float16, keys=16), "dense", backend="triton")
    assert made == []
    assert attending.boxes is boxes
