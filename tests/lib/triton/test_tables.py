"""Plans on a device: how long they live, who uploads them, and in what order. Devices are faked: the meta device stands
for a GPU where only identity and lifetimes matter."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from closecall import geometry
from closecall import placed as module
from closecall.backends.triton.tables import tables
from closecall.ranking import Source
from closecall.rules.last_tile import LastTile
from closecall.rules.topk import TopK

CPU = torch.device("cpu")


class Cuda:
    """A device that says it is a GPU; what goes to it stays on the CPU."""

    type = "cuda"

    def __str__(self) -> str:
        return "cuda:0"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    device = Cuda()
    plain = torch.Tensor.to

    def to(self: torch.Tensor, where: object, *args: object, **kwargs: object) -> torch.Tensor:
        assert kwargs.get("non_blocking") is not True, "an upload that another stream may overtake"
        return plain(self, CPU if where is device else where, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "_captured", {})
    return device


def forget_plans() -> None:
    for length in range(1, 300):  # more than are remembered
        geometry.plan(1, length, length, 64, 64)
    gc.collect()


def test_a_plan_goes_to_a_device_once(gpu: Cuda) -> None:
    first = tables(geometry.plan(1, 500, 500, 64, 64), gpu)  # type: ignore[arg-type]
    assert tables(geometry.plan(1, 500, 500, 64, 64), gpu) is first  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_padded_and_packed_plans_are_kept_too(gpu: Cuda, kind: str) -> None:
    def made() -> geometry.Geometry:
        if kind == "packed":
            return geometry.plan(1, 200, 200, 64, 64, cu_seqlens=torch.tensor([0, 70, 200]))
        return geometry.plan(2, 200, 200, 64, 64, torch.arange(200) >= torch.tensor([[30], [0]]))

    assert made() is made()
    assert tables(made(), gpu) is tables(made(), gpu)  # type: ignore[arg-type]


def test_plans_that_differ_are_not_mixed_up() -> None:
    one = geometry.plan(1, 200, 200, 64, 64, cu_seqlens=torch.tensor([0, 70, 200]))
    other = geometry.plan(1, 200, 200, 64, 64, cu_seqlens=torch.tensor([0, 71, 200]))
    assert one is not other
    assert one.rows.tolist() != other.rows.tolist()


def test_a_plan_nobody_uses_is_freed(gpu: Cuda) -> None:
    there = weakref.ref(tables(geometry.plan(1, 1000, 1000, 64, 64), gpu))  # type: ignore[arg-type]
    forget_plans()
    assert there() is None


def test_what_a_graph_captured_outlives_its_plan(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = geometry.plan(1, 1001, 1001, 64, 64)
    there = weakref.ref(tables(plan, gpu))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tables(plan, gpu)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    del plan
    forget_plans()
    assert there() is not None


def test_a_plan_is_not_uploaded_in_capture(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would repeat the copy from host memory that is long gone."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"M = 1002, N = 1002\) is not on cuda:0 yet: make the call once before"):
        tables(geometry.plan(1, 1002, 1002, 64, 64), gpu)  # type: ignore[arg-type]


def protected(plan: geometry.Geometry, gpu: Cuda) -> torch.Tensor:
    """What the rule of `auto` keeps on the device: how many blocks each tile gains or pays."""
    source = Source(plan.row, plan.row, plan, 1.0, 1)
    return LastTile(TopK(budget=4))._moved_by_plan(source, gpu)[0]  # type: ignore[arg-type]


def test_what_the_last_tile_rule_settles_lives_as_long_as_tables_do(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was computed on the device by the stream that asked first, and dropped after 64 plans, captured or not."""
    plan = geometry.plan(1, 2000, 2000, 64, 64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"N = 2000\) is not on cuda:0 yet: make the call once before capture"):
        protected(plan, gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    there = weakref.ref(protected(plan, gpu))
    assert protected(plan, gpu) is there()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert protected(plan, gpu) is there()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    del plan
    forget_plans()
    assert there() is not None
    module._captured.clear()
    assert there() is None


@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_forced_and_visible_are_the_plans(gpu: Cuda, sinks: int) -> None:
    plan = geometry.plan(2, 300, 300, 32, 64, torch.arange(300) >= torch.tensor([[33], [0]]))
    here = tables(plan, gpu)  # type: ignore[arg-type]
    assert torch.equal(here.forced(sinks), plan.forced(sinks))
    assert torch.equal(here.geometry.forced(sinks), plan.forced(sinks))
    assert torch.equal(here.visible, plan.visible)
    assert torch.equal(here.geometry.visible, plan.visible)
