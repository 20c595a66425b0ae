"""Contenders in turn, round by round: like `closecall_lab.spine.timing`, but one round may be enough.

At 128K a round of a shape's baselines takes minutes, and its times differ from the next round's by a percent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...spine import memory
from ...spine.timing import SETTLE_SECONDS, Contender, Samples
from ..validate.device import Device
from .parts import Lap

WARM_SECONDS = 2.0  # a first round that took longer counts: what warming up costs is lost in it


@dataclass(frozen=True)
class Prefill(Contender):
    """One prefill, split into parts."""

    timed: Callable[[], Lap]

    @classmethod
    def named(cls, name: str, timed: Callable[[], Lap]) -> Prefill:
        return cls(name, {}, 0, timed)

    def run(self) -> tuple[Lap, Any]:
        return self.timed(), None


def take_turns(contenders: Sequence[Prefill], rounds: int, device: Device) -> Samples:
    """`rounds` laps of each, in an order drawn anew for every round. The first lap measures memory too."""
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
