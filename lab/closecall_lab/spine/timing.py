"""Interleaved timing: contenders take turns in one loop, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import memory

LEAST_ROUNDS = 3
SETTLE_SECONDS = 0.01  # OpenMP's threads spin for a while after torch's kernels; whoever comes next would pay for it
SAMPLE_SECONDS = 0.01  # a faster contender is called several times per sample, to stay clear of the clock's grain


@dataclass(frozen=True)
class Contender:
    """Something to time: steps that run one after the other, each on what the step before returned."""

    name: str
    steps: dict[str, Callable[[Any], Any]]
    threads: int

    @classmethod
    def of(cls, name: str, run: Callable[[], Any], threads: int) -> Contender:
        return cls(name, {"": lambda _: run()}, threads)

    def run(self) -> tuple[dict[str, float], Any]:
        """One run: seconds per step, and what the last step returned."""
        taken, result = {}, None
        for step, call in self.steps.items():
            begin = time.perf_counter()
            result = call(result)
            taken[step] = time.perf_counter() - begin
        return taken, result


@dataclass
class Samples:
    """Seconds per call of every contender, one entry per round."""

    laps: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    extra_bytes: dict[str, int | None] = field(default_factory=dict)
    probes: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return max(map(len, self.laps.values()), default=0)

    def seconds(self, name: str, step: str | None = None) -> list[float]:
        return [sum(lap.values()) if step is None else lap.get(step, 0.0) for lap in self.laps[name]]

    def median(self, name: str, step: str | None = None) -> float:
        return statistics.median(self.seconds(name, step))

    def ratio(self, slower: str, faster: str, step: str | None = None) -> float | None:
        """Median over the rounds of one's time over another's (or a step of it); None if either did not run."""
        if slower not in self.laps or faster not in self.laps:
            return None
        pairs = zip(self.seconds(slower), self.seconds(faster, step), strict=True)
        return statistics.median(a / b for a, b in pairs)

    def share(self, name: str, step: str) -> float:
        """Median over the rounds of a step's share of its contender's time."""
        return statistics.median(a / b for a, b in zip(self.seconds(name, step), self.seconds(name), strict=True))


def _sample(contender: Contender, calls: int) -> dict[str, float]:
    time.sleep(SETTLE_SECONDS)
    if torch.get_num_threads() != contender.threads:
        torch.set_num_threads(contender.threads)
        if calls > 1:  # a new thread count starts threads; let a short sample not pay for that
            contender.run()
    laps = [contender.run()[0] for _ in range(calls)]
    return {step: sum(lap[step] for lap in laps) / calls for step in laps[0]}


def interleave(
    contenders: Sequence[Contender],
    *,
    seconds: float,
    most_rounds: int,
    probe: Callable[[], float] | None = None,
) -> Samples:
    """Times the contenders in turn for about `seconds`, at least three rounds and at most `most_rounds`.

    The order is drawn anew for every round, so that none always follows the same other. The first round measures
    memory too and warms up; it counts only where the contenders are so slow that warming up no longer matters and
    another round would be a long wait. `probe` runs once a round.
    """
    samples = Samples({c.name: [] for c in contenders})
    first_probe = probe() if probe else 0.0
    first: dict[str, dict[str, float]] = {}
    calls: dict[str, int] = {}
    for c in contenders:
        torch.set_num_threads(c.threads)
        before = memory.mark()
        first[c.name], output = c.run()
        samples.extra_bytes[c.name] = memory.extra_since(before, output)
        del output
        taken = sum(first[c.name].values())
        if taken < 20 * SAMPLE_SECONDS:
            taken = sum(c.run()[0].values())
        calls[c.name] = max(1, math.ceil(SAMPLE_SECONDS / taken))
    round_seconds = sum(sum(first[c.name].values()) * calls[c.name] for c in contenders)
    if round_seconds * LEAST_ROUNDS > seconds:
        rounds = LEAST_ROUNDS - 1
        for name, lap in first.items():
            samples.laps[name].append(lap)
        samples.probes.append(first_probe)
    else:
        rounds = min(max(int(seconds / round_seconds), LEAST_ROUNDS), max(most_rounds, LEAST_ROUNDS))
    draw = random.Random(0)
    for _ in range(rounds):
        samples.probes.append(probe() if probe else 0.0)
        for c in draw.sample(contenders, len(contenders)):
            samples.laps[c.name].append(_sample(c, calls[c.name]))
    return samples
