"""A GPU made of CPU tensors: the calls of torch.cuda that the kit makes, answered and written down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from closecall_lab.bench.validate.device import Cuda, Device


@dataclass(frozen=True)
class FakeGpu(Cuda):
    """One of the machine's GPUs. Their memory is the host's, so that all others look like the first."""

    world: FakeCuda

    def others(self) -> list[Device]:
        return [FakeGpu(self.place, self.world) for _ in range(self.world.gpus - 1)]


@dataclass
class FakeCuda:
    """A clock that moves only when an event is recorded, by `step_ms`; memory that is what the test says."""

    step_ms: float = 5.0
    now_ms: float = 0.0
    free: int = 8 * 2**30
    allocated: int = 1000
    peak: int = 1000
    mode: int = 0
    log: list[str] = field(default_factory=list)
    replay: Callable[[], object] = lambda: None
    broken: bool = False  # as after an illegal access
    stream: int = 0  # the current one; 0 is the usual one
    streams: int = 0  # made so far
    gpus: int = 1

    def install(self, patch: pytest.MonkeyPatch) -> Cuda:
        world = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                world.now_ms += world.step_ms
                self.at: float | None = world.now_ms
                world.log.append("record")

            def synchronize(self) -> None:
                world.log.append("wait")

            def elapsed_time(self, end: Event) -> float:
                assert world.log[-1] == "wait"  # torch refuses to read events that may not have happened yet
                assert self.at is not None
                assert end.at is not None
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                world.log.append("replay")
                world.replay()

        @contextlib.contextmanager
        def graph(_: Graph, pool: Any = None) -> Iterator[None]:
            assert pool is not None  # graphs of one context share their memory
            world.log.append("capture")
            yield

        @contextlib.contextmanager
        def stream(taken: SimpleNamespace) -> Iterator[None]:
            world.log.append("side stream")
            before, world.stream = world.stream, taken.number
            yield
            world.stream = before

        def set_mode(mode: int | str) -> None:
            world.mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode
            world.log.append(f"mode {world.mode}")

        def synchronize() -> None:
            if world.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            world.log.append("wait")

        def properties(_: Any) -> SimpleNamespace:
            return SimpleNamespace(name="Fake 100", major=9, minor=0, total_memory=2**36, multi_processor_count=132)

        def new_stream() -> SimpleNamespace:
            world.streams += 1
            return SimpleNamespace(wait_stream=lambda _: None, number=world.streams)

        def current_stream() -> SimpleNamespace:
            return SimpleNamespace(wait_stream=lambda _: None, number=world.stream)

        names: dict[str, Any] = {
            "Event": Event, "CUDAGraph": Graph, "graph": graph, "stream": stream, "Stream": new_stream,
            "current_stream": current_stream, "graph_pool_handle": lambda: "a pool",
            "is_current_stream_capturing": lambda: False,
            "get_sync_debug_mode": lambda: world.mode, "set_sync_debug_mode": set_mode,
            "synchronize": synchronize, "get_device_properties": properties, "empty_cache": lambda: None,
            "mem_get_info": lambda _: (world.free, 2**36), "memory_allocated": lambda _: world.allocated,
            "max_memory_allocated": lambda _: world.peak, "reset_peak_memory_stats": lambda _: None,
            "is_available": lambda: True, "device_count": lambda: 2, "current_device": lambda: 0,
            "set_device": lambda index: world.log.append(f"device {index}"),
        }  # fmt: skip
        for name, value in names.items():
            patch.setattr(torch.cuda, name, value)
        return FakeGpu(torch.device("cpu"), world)
