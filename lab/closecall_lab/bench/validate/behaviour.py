"""What a backend must do beside giving right numbers: the same bits every time, on every stream and every device of the
machine, without waiting for the host, and from a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import closecall

from ...spine.results import Facts
from .cases import CASES, POLICIES, Case
from .check import WrongAnswerError, check
from .device import Device
from .graphs import same_bits

REPEATS = 50
PRESETS = (*POLICIES, "auto")
PACKED = Case("packed", packed=(500, 1, 64, 700), keys=1265)
PADDED = Case("padded", batch=2, pad="left", keys=900)
DECODE = Case("decode", rows=1, keys=1000, heads=8)
Look = Callable[[Case, Device, str], Facts]


@dataclass(frozen=True)
class Behaviour:
    """One look at how a call behaves."""

    name: str
    case: Case
    look: Look
    gpu: bool = True  # whether only a GPU can be asked

    def possible(self, device: Device, backend: str) -> bool:
        """The flex and reference backends do wait for the host, and say so in their docs."""
        if self.look is second:
            return bool(device.others())
        return not self.gpu or (device.is_gpu and backend not in ("flex", "reference"))

    def run(self, device: Device, backend: str) -> Facts:
        return self.look(self.case, device, backend)


def _call(case: Case, device: Device, backend: str) -> tuple[Tensor, Callable[[], Tensor]]:
    """The queries, and the call that reads them. Padding and packing are told on the CPU, so that nobody waits."""
    q, k, v = case.tensors(device.place)
    p, arguments = case.policy(), case.arguments()
    return q, lambda: closecall.attention(q, k, v, p, backend=backend, **arguments)


def _differs(mine: Tensor, first: Tensor) -> str:
    at = (mine != first).nonzero()
    place = at[0].tolist() if len(at) else [0] * mine.ndim
    return f"at {place} {float(mine[tuple(place)])}, not {float(first[tuple(place)])}"


def repeats(case: Case, device: Device, backend: str) -> Facts:
    _, call = _call(case, device, backend)
    first = call()
    for number in range(2, REPEATS + 1):
        again = call()
        if not same_bits(again, first):
            raise WrongAnswerError(
                f"call {number} of {REPEATS} gave other bits than the first: {_differs(again, first)}"
            )
    return {"repeats": REPEATS}


def capture(case: Case, device: Device, backend: str) -> Facts:
    q, call = _call(case, device, backend)
    generator = torch.Generator().manual_seed(11)
    other = torch.randn(q.shape, generator=generator).to(q.device, q.dtype)
    return {"problem": device.capture_problem(call, q, torch.where(q.isnan(), q, other))}


def streams(case: Case, device: Device, backend: str) -> Facts:
    """On a plan that no call had before, so that what one stream uploads is read by another at once."""
    _, call = _call(case, device, backend)
    *aside, usual = device.on_streams(call)
    for number, made in enumerate(aside, 1):
        if not same_bits(made, usual):
            raise WrongAnswerError(f"stream {number} gave other bits than the usual one: {_differs(made, usual)}")
    return {"streams": len(aside)}


def second(case: Case, device: Device, backend: str) -> Facts:
    """The other devices, while the first one stays the current one."""
    ours = _call(case, device, backend)[1]().cpu()
    facts: Facts = {}
    for other in device.others():
        check(case, other, backend)
        same_kind = other.facts()["device"] == device.facts()["device"]
        theirs = _call(case, other, backend)[1]().cpu()
        if same_kind and not same_bits(theirs, ours):
            raise WrongAnswerError(f"{other.place} gives other bits than {device.place}: {_differs(theirs, ours)}")
        facts[str(other.place)] = other.facts()
    return facts


def _listed() -> list[Behaviour]:
    cases = [*(Case(preset, preset) for preset in PRESETS), DECODE, PACKED, PADDED]
    checks = [Behaviour(f"{REPEATS} repeats, bit for bit: {case.name}", case, repeats, gpu=False) for case in cases]
    checks += [Behaviour(f"no host synchronisation, graph capture: {case.name}", case, capture) for case in cases]
    fresh = [Case("router-on-quest", keys=907), Case("auto", "auto", keys=909)]
    fresh.append(Case("packed", packed=(501, 400), keys=901))
    checks += [Behaviour(f"two streams at once: {case.name}", case, streams) for case in fresh]
    checks += [Behaviour(f"the other GPUs: {case.name}", case, second) for case in (Case("router-on-quest"), DECODE)]
    return checks


BEHAVIOURS = tuple(_listed())
EVERYTHING: tuple[Case | Behaviour, ...] = (*CASES, *BEHAVIOURS)
