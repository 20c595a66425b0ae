"""The seam to the device, on the CPU and on a GPU that is faked at torch.cuda."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_cuda import FakeCuda

from closecall_lab.bench.validate import device
from closecall_lab.bench.validate.device import Cpu, Cuda
from closecall_lab.spine.timing import interleave


def test_events_time_each_step_and_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(step_ms=5)
    on = fake.install(monkeypatch)

    def slow(_: object) -> str:
        fake.now_ms += 20
        return "made"

    taken, result = on.contender("ours", {"select": slow, "attend": lambda made: f"{made}, used"}).run()
    assert result == "made, used"
    assert taken == {"select": 0.025, "attend": 0.005}  # seconds, where events count milliseconds
    assert fake.log == ["record", "record", "record", "wait"]


def test_event_timed_contenders_take_turns_in_the_benchmarks_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on = FakeCuda(step_ms=300).install(monkeypatch)
    samples = interleave([on.contender(n, {"": lambda _: None}) for n in ("one", "two")], seconds=3.01, most_rounds=99)
    assert samples.rounds == 5
    assert samples.seconds("one") == samples.seconds("two") == [0.3] * 5


def test_extra_memory_is_the_peak_without_inputs_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(allocated=1000, peak=9000)
    on = fake.install(monkeypatch)
    assert on.extra_bytes(lambda: torch.zeros(500), seen_by_clock=7) == 9000 - 1000 - 2000
    assert on.extra_bytes(lambda: None, seen_by_clock=None) == 8000
    assert Cpu().extra_bytes(lambda: None, seen_by_clock=7) == 7  # the loop's own count of the host's memory


def test_what_a_gpu_says_of_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeCuda(free=12345)
    on = fake.install(monkeypatch)
    driver = tmp_path / "version"
    monkeypatch.setattr(device, "DRIVERS", (tmp_path / "none", driver))
    assert on.facts()["driver"] is None
    driver.write_text("570.1\n")
    facts = on.facts()
    assert (facts["device"], facts["capability"], facts["driver"]) == ("Fake 100", "9.0", "570.1")
    assert facts["memory_gib"] == 64.0
    assert on.free_bytes() == 12345


def test_a_path_that_replays_on_new_inputs_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)
    q, other = torch.ones(4), torch.full((4,), 3.0)
    made: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        made.append(q * 2)
        return made[-1]

    fake.replay = lambda: made[-1].copy_(q * 2)  # what was captured last, computed again in place
    assert on.capture_problem(call, q, other) is None
    assert fake.log == ["side stream", "mode 2", "mode 0", "side stream", "capture", "replay", "wait"]
    fake.replay = lambda: None  # a graph that holds the old queries' results
    q.fill_(1.0)
    assert "replayed on other queries" in str(on.capture_problem(call, q, other))


def test_a_path_that_waits_for_the_device_is_found_and_the_mode_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(mode=1)
    on = fake.install(monkeypatch)

    def call() -> torch.Tensor:
        if fake.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        return torch.ones(1)

    problem = on.capture_problem(call, torch.ones(1), torch.zeros(1))
    assert problem == "the host waits for the device: RuntimeError: called a synchronizing CUDA operation"
    assert fake.mode == 1
    assert "capture" not in fake.log


def test_a_path_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)

    def call() -> torch.Tensor:
        if "capture" in fake.log:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    problem = on.capture_problem(call, torch.ones(1), torch.zeros(1))
    assert problem is not None
    assert problem.startswith("no graph can be captured: RuntimeError: operation not permitted")


def test_a_cpu_captures_nothing() -> None:
    with pytest.raises(ValueError, match="use --device cuda"):
        Cpu().capture_problem(lambda: torch.ones(1), torch.ones(1), torch.ones(1))


def test_a_gpu_that_fails_even_to_wait_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)
    assert not on.is_lost()
    fake.broken = True
    assert on.is_lost()
    assert not Cpu().is_lost()


def test_free_memory_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "meminfo"
    monkeypatch.setattr(device, "MEMINFO", page)
    assert Cpu().free_bytes() is None
    page.write_text("MemTotal:  9 kB\nMemAvailable:   123 kB\n")
    assert Cpu().free_bytes() == 123 * 1024


def test_the_device_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(device.pick(None), Cpu)
    fake = FakeCuda()
    fake.install(monkeypatch)
    assert device.pick(None) == Cuda(torch.device("cuda", 0))
    assert device.pick("cuda:1") == Cuda(torch.device("cuda", 1))
    assert fake.log == ["device 0", "device 1"]
    assert isinstance(device.pick("cpu"), Cpu)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--device cuda is not there: torch .* use --device cpu"):
        device.pick("cuda")
    with pytest.raises(ValueError, match="unknown --device 'cdua': did you mean 'cuda'"):
        device.pick("cdua")
    FakeCuda().install(monkeypatch)
    with pytest.raises(ValueError, match="--device cuda:2 is not there: the last one is cuda:1"):
        device.pick("cuda:2")
