"""The seam to the device: its facts, its clock, its memory, and what only a GPU can be asked."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from closecall.info import cpu_model
from closecall.registry import unknown

from ...spine.results import Facts
from ...spine.timing import Contender
from . import graphs, hardware
from .graphs import Graphs

Steps = Mapping[str, Callable[[Any], Any]]
MEMINFO = Path("/proc/meminfo")
NO_GRAPHS = "a CPU captures no graphs: use --device cuda"
LOAD_SECONDS = 1.0  # of work to look at the clocks under
DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


class Device(Protocol):
    """What the kit asks of a device."""

    @property
    def place(self) -> torch.device: ...

    @property
    def is_gpu(self) -> bool: ...

    @property
    def roundoff(self) -> float:
        """The unit roundoff of its float32 sums."""

    @property
    def warm_ups(self) -> int:
        """Calls before the first one that may be timed."""

    def facts(self) -> Facts: ...

    def free_bytes(self) -> int | None:
        """Memory that can be allocated now; None if the system does not tell."""

    def contender(self, name: str, steps: Steps) -> Contender:
        """The steps, timed by this device's clock."""

    def extra_bytes(self, call: Callable[[], Any], seen_by_clock: int | None) -> int | None:
        """Peak memory of a call beyond inputs and output; `seen_by_clock` is what the timing loop saw of the host."""

    def capture_problem(self, call: Callable[[], Tensor], q: Tensor, other: Tensor) -> str | None:
        """Why `call`, which reads `q`, cannot run without waiting for the host or be captured in a graph; None if
        it can. `other` are the queries that the graph is replayed on."""

    def graph_pool(self) -> Graphs:
        """What captures calls for replay."""

    def on_streams(self, call: Callable[[], Tensor]) -> list[Tensor]:
        """What the call gives on two new streams that do not wait for each other, and then as usual."""

    def others(self) -> list[Device]:
        """The other devices of this machine."""

    def under_load(self, call: Callable[[], Any], seconds: float) -> Facts | None:
        """Clocks, power and temperature while calls of so many seconds run; None where nobody tells."""

    def is_lost(self) -> bool:
        """Whether nothing more can run in this process, after an error."""


class Cpu:
    place = torch.device("cpu")
    is_gpu = False
    roundoff = 2.0**-24
    warm_ups = 0  # nothing is compiled at the first call, and the timing loop's own first round warms up

    def facts(self) -> Facts:
        return {"device": cpu_model(), "threads": torch.get_num_threads()}

    def free_bytes(self) -> int | None:
        try:
            found = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found.group(1)) * 1024 if found else None

    def contender(self, name: str, steps: Steps) -> Contender:
        return Contender(name, dict(steps), torch.get_num_threads())

    def extra_bytes(self, call: Callable[[], Any], seen_by_clock: int | None) -> int | None:
        return seen_by_clock

    def capture_problem(self, call: Callable[[], Tensor], q: Tensor, other: Tensor) -> str | None:
        raise ValueError(NO_GRAPHS)

    def graph_pool(self) -> Graphs:
        raise ValueError(NO_GRAPHS)

    def on_streams(self, call: Callable[[], Tensor]) -> list[Tensor]:
        raise ValueError("a CPU has no streams: use --device cuda")

    def others(self) -> list[Device]:
        return []

    def under_load(self, call: Callable[[], Any], seconds: float) -> Facts | None:
        return None

    def is_lost(self) -> bool:
        return False


@dataclass(frozen=True)
class OnStream(Contender):
    """Timed by events on the device's stream: the host only waits once, after the last step."""

    def run(self) -> tuple[dict[str, float], Any]:
        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(len(self.steps) + 1)
        ]
        result = None
        marks[0].record()
        for call, mark in zip(self.steps.values(), marks[1:], strict=True):
            result = call(result)
            mark.record()
        marks[-1].synchronize()
        taken = (begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(marks))
        return dict(zip(self.steps, taken, strict=True)), result


@dataclass(frozen=True)
class Cuda:
    """Also ROCm devices, which torch calls cuda."""

    place: torch.device
    is_gpu: bool = field(default=True, init=False)
    # Tensor cores cut off the bits that a sum has no room for where a CPU rounds: twice the error.
    roundoff: float = field(default=2.0**-23, init=False)
    warm_ups: int = field(default=graphs.WARM_UPS, init=False)

    def facts(self) -> Facts:
        at = torch.cuda.get_device_properties(self.place)
        return {
            "device": at.name,
            "capability": f"{at.major}.{at.minor}",
            "memory_gib": round(at.total_memory / 2**30, 1),
            "multiprocessors": at.multi_processor_count,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "driver": next((path.read_text().strip() for path in DRIVERS if path.exists()), None),
        }

    def free_bytes(self) -> int | None:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.place)[0])

    def contender(self, name: str, steps: Steps) -> Contender:
        return OnStream(name, dict(steps), torch.get_num_threads())

    def extra_bytes(self, call: Callable[[], Any], seen_by_clock: int | None) -> int | None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.place)
        before = torch.cuda.memory_allocated(self.place)
        output = call()
        torch.cuda.synchronize()
        mine = output.nbytes if isinstance(output, Tensor) else 0
        return max(0, int(torch.cuda.max_memory_allocated(self.place)) - int(before) - mine)

    def capture_problem(self, call: Callable[[], Tensor], q: Tensor, other: Tensor) -> str | None:
        return graphs.problem(call, q, other)

    def graph_pool(self) -> Graphs:
        return Graphs()

    def on_streams(self, call: Callable[[], Tensor]) -> list[Tensor]:
        return graphs.on_streams(call)

    def others(self) -> list[Device]:
        return [Cuda(torch.device("cuda", i)) for i in range(torch.cuda.device_count()) if i != self.place.index]

    def under_load(self, call: Callable[[], Any], seconds: float) -> Facts | None:
        at = torch.cuda.get_device_properties(self.place)
        amd = bool(torch.version.hip)
        identity = None if amd else getattr(at, "uuid", None)
        place: list[Any] = [getattr(at, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        bus = None if None in place else "{:04x}:{:02x}:{:02x}.0".format(*place)
        for _ in range(min(200, math.ceil(LOAD_SECONDS / max(seconds, 1e-6)))):  # asked for, not waited for
            call()
        found = hardware.read(f"GPU-{identity}" if identity else str(self.place.index or 0), amd, bus)
        torch.cuda.synchronize()
        return found

    def is_lost(self) -> bool:
        try:  # after an illegal access, say, every call fails
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


def pick(name: str | None) -> Device:
    """The device of that name, or the best there is. A ValueError says what to use instead."""
    cuda_there = torch.cuda.is_available()
    if name is None:
        name = "cuda" if cuda_there else "cpu"
    if name == "cpu":
        return Cpu()
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise unknown("--device", name, ("cpu", "cuda", "cuda:1"))
    if not cuda_there:
        built = "finds no GPU" if torch.version.cuda or torch.version.hip else "is built without CUDA"
        raise ValueError(f"--device {name} is not there: torch {torch.__version__} {built}; use --device cpu")
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"--device {name} is not there: the last one is cuda:{last}; use --device cuda:{last}")
    torch.cuda.set_device(index)  # Triton launches on the current device
    return Cuda(torch.device("cuda", index))
