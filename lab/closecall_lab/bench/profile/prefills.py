"""What all profiles share: prefills of a model with and without closecall, run in turn and split into parts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from closecall.hf.attach import Handle, attach

from ...spine import memory
from ...spine.numbers import known_mean, mebibytes
from ...spine.results import Facts
from ...spine.timing import SETTLE_SECONDS, Contender, Samples
from ..base import Benchmark, label, tier, uncut
from ..validate.device import Cpu, Device
from .parts import Clock, HostClock, Lap, StreamClock, split
from .policies import UNATTACHED, ProfiledPolicy

WARM_SECONDS = 2.0  # a first round that took longer counts: what warming up costs is lost in it


@dataclass(frozen=True, kw_only=True)
class Profile(Benchmark):
    """A benchmark of prefills: every context, thread count and type is a cell, and all policies take turns in it."""

    contexts: tuple[int, ...]
    policies: tuple[ProfiledPolicy, ...]
    threads: tuple[int, ...]
    rounds: int
    name: str
    device: Device = field(default_factory=Cpu)

    @property
    def warnings(self) -> list[str]:
        return uncut([(p.name, p.policy) for p in self.policies], self.contexts)

    def shared(self) -> Facts:
        import transformers

        return {
            "device": self.device.facts()["device"],
            "transformers": transformers.__version__,
            "variants": [p.to_json() for p in self.policies],
            "tier": tier(),
            "rounds": self.rounds,
        }

    def label(self, cell: Facts) -> str:
        return label(cell)


@dataclass(frozen=True)
class Prefill(Contender):
    """One prefill, split into parts."""

    timed: Callable[[], Lap]

    @classmethod
    def named(cls, name: str, timed: Callable[[], Lap]) -> Prefill:
        return cls(name, {}, 0, timed)

    def run(self) -> tuple[Lap, Any]:
        return self.timed(), None


class Prefills:
    """The contenders of one cell, and what the attached ones kept."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.clock: Clock = StreamClock() if device.is_gpu else HostClock()
        self.contenders: list[Prefill] = []
        self.handles: dict[str, Handle] = {}

    def add(self, model: Any, prefill: Callable[[], object], name: str = UNATTACHED) -> None:
        """The model as it is."""
        self.contenders.append(Prefill.named(name, lambda: split(model, prefill, self.clock)))

    def add_attached(self, model: Any, prefill: Callable[[], object], profiled: ProfiledPolicy) -> None:
        """The model under a policy. People attach once and call often, so attaching is no part of a prefill's time."""

        def timed() -> Lap:
            with attach(model, profiled.policy) as handle:
                lap = split(model, prefill, self.clock)
            self.handles[profiled.name] = handle
            return lap

        self.contenders.append(Prefill.named(profiled.name, timed))

    def measure(self, rounds: int, about: list[str]) -> Facts:
        """The result of a cell; `about` says what was measured."""
        samples = take_turns(self.contenders, rounds, self.device)
        return {
            "rounds": samples.rounds,
            "laps": samples.laps,
            "kept": {name: kept(handle) for name, handle in self.handles.items()},
            "extra_mib": {name: mebibytes(x) for name, x in samples.extra_bytes.items()},
            "measured": about,
        }


def kept(handle: Handle) -> dict[str, float | None]:
    """What the last prefill kept, over all layers that left something out; None where none did."""
    layers, keys = handle.stats().values(), ("effective_budget", "kept_fraction", "trigger_rate")
    return {key: known_mean(float(layer[key]) for layer in layers) for key in keys}


def take_turns(contenders: Sequence[Prefill], rounds: int, device: Device) -> Samples:
    """`rounds` laps of each, in an order drawn anew for every round. The first lap measures memory too.

    Unlike `closecall_lab.spine.timing.interleave`, one round may be enough: at 128K a round of a shape's baselines
    takes minutes, and its times differ from the next round's by a percent.
    """
    samples = Samples({c.name: [] for c in contenders})
    first: dict[str, Lap] = {}
    for contender in contenders:
        before = memory.mark()
        first[contender.name], _ = contender.run()
        seen = memory.extra_since(before, None)
        samples.extra_bytes[contender.name] = device.extra_bytes(contender.timed, seen)
    slow = sum(sum(lap.values()) for lap in first.values()) > WARM_SECONDS
    if slow and not device.is_gpu:  # the first call on a GPU compiles
        for name, lap in first.items():
            samples.laps[name].append(lap)
    draw = random.Random(0)
    while samples.rounds < rounds:
        for contender in draw.sample(list(contenders), len(contenders)):
            time.sleep(SETTLE_SECONDS)
            samples.laps[contender.name].append(contender.run()[0])
    return samples
