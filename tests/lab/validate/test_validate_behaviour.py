"""Repeats, graphs, streams and other devices: what is as it must be passes, and each look finds what is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

import closecall
from closecall_lab.bench.validate import behaviour, graphs
from closecall_lab.bench.validate.behaviour import BEHAVIOURS, capture, repeats, second, streams
from closecall_lab.bench.validate.cases import Case
from closecall_lab.bench.validate.check import WrongAnswerError, check
from closecall_lab.bench.validate.device import Cpu, Cuda, Device

SMALL = Case("small", "quest", "fp32", dim=16, keys=500)
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Makes `attention` give something else, now and then."""
    right = closecall.attention

    def install(change: Change) -> None:
        monkeypatch.setattr(closecall, "attention", lambda *args, **kwargs: change(right(*args, **kwargs)))

    return install


def nudged(out: torch.Tensor) -> torch.Tensor:
    """The last bit of one number."""
    bits = out.view(torch.int32).clone()
    bits[0, 1, 17, 3] ^= 1
    return bits.view(torch.float32)


def test_every_call_gives_the_same_bits(spoil: Any) -> None:
    assert repeats(SMALL, Cpu(), "reference") == {"repeats": behaviour.REPEATS}
    calls = itertools.count(1)
    spoil(lambda out: nudged(out) if next(calls) == behaviour.REPEATS else out)
    with pytest.raises(WrongAnswerError, match=r"call 50 of 50 gave other bits than the first: at \[0, 1, 17, 3\]"):
        repeats(SMALL, Cpu(), "reference")


def test_bits_are_compared_not_numbers() -> None:
    zero, nan = torch.tensor([0.0, torch.nan]), torch.tensor([-0.0, torch.nan])
    assert graphs.same_bits(zero, zero.clone())
    assert not graphs.same_bits(zero, nan)
    assert not graphs.same_bits(zero, zero.half())
    assert not graphs.same_bits(zero, zero[:1])


def test_streams_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)
    assert streams(SMALL, on, "reference") == {"streams": 2}
    assert fake.log.count("side stream") == 2
    first = fake.streams + 1
    spoil(lambda out: nudged(out) if fake.stream == first + 1 else out)  # as where what one uploads another reads early
    with pytest.raises(WrongAnswerError, match="stream 2 gave other bits than the usual one"):
        streams(SMALL, on, "reference")


def test_packed_calls_are_captured_and_replayed_on_other_queries(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)
    packed = Case("packed", "quest", "fp32", dim=16, packed=(300, 200), keys=500)
    assert packed.arguments()["cu_seqlens"].device.type == "cpu"  # or the call would wait for it
    made: list[torch.Tensor] = []
    seen: list[Any] = []
    right = closecall.attention

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        made.append(right(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(closecall, "attention", note)
    fake.replay = lambda: made[-1].copy_(right(*seen[-1][0], **seen[-1][1]))  # as a graph does, on what q holds now
    assert capture(packed, on, "reference") == {"problem": None}
    assert "capture" in fake.log
    assert "cu_seqlens" in seen[-1][1]
    fake.replay = lambda: None  # a graph that does not read q
    found = capture(packed, on, "reference")
    assert "replayed on other queries" in found["problem"]


class Other(Cpu):
    """Another GPU of the machine."""

    def __init__(self, name: str = "same") -> None:
        self.name = name

    def facts(self) -> dict[str, Any]:
        return {"device": self.name}


class Two(Other):
    def __init__(self, other: Other) -> None:
        super().__init__()
        self.other = other

    def others(self) -> list[Device]:
        return [self.other]


def test_other_devices_are_right_and_give_the_same_bits(spoil: Any) -> None:
    assert second(SMALL, Two(Other()), "reference") == {"cpu": {"device": "same"}}
    calls = itertools.count(1)
    spoil(lambda out: nudged(out) if next(calls) % 2 == 0 else out)  # the second call here is the other device's
    with pytest.raises(WrongAnswerError, match="cpu gives other bits than cpu"):
        second(SMALL, Two(Other()), "reference")
    assert second(SMALL, Two(Other("another kind")), "reference")  # may round otherwise
    assert second(SMALL, Cpu(), "reference") == {}


def test_a_wrong_answer_of_another_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check

    def wrong(case: Case, device: Device, backend: str) -> Any:
        right(case, device, backend)
        raise WrongAnswerError("output is off")

    monkeypatch.setattr(behaviour, "check", wrong)
    with pytest.raises(WrongAnswerError, match="output is off"):
        second(SMALL, Two(Other()), "reference")


def test_the_other_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    mine = Cuda(torch.device("cuda", 1))
    assert [str(d.place) for d in mine.others()] == ["cuda:0"]


def test_what_is_looked_at_where(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b.name for b in BEHAVIOURS]
    assert len(set(names)) == len(names)
    for wanted in ("repeats*: auto", "capture: packed", "capture: padded", "streams at once: packed", "GPUs: decode"):
        assert any(name.endswith(wanted.split("*")[-1]) for name in names)
    on_cpu = {b.look for b in BEHAVIOURS if b.possible(Cpu(), "cpu")}
    assert on_cpu == {repeats}
    gpu = FakeCuda(gpus=2).install(monkeypatch)
    assert {b.look for b in BEHAVIOURS if b.possible(gpu, "triton")} == {repeats, capture, streams, second}
    assert {b.look for b in BEHAVIOURS if b.possible(gpu, "flex")} == {repeats, second}
    gpu = FakeCuda(gpus=1).install(monkeypatch)
    assert {b.look for b in BEHAVIOURS if b.possible(gpu, "triton")} == {repeats, capture, streams}
