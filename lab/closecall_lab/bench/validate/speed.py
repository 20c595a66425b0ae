"""Times our kernels and their rivals at one context, in turn, in one loop, beside the rest of a decoder layer.

The paper reports attention's share of a prefill and the wall time against dense. Both need the rest of the model: here
it is the matrix products of one layer (projections and a gated MLP), timed in the same rounds. Norms, rotary embedding
and the residual sums are left out, so shares are a little high.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from closecall import backends
from closecall.api import PlannedCall, check_room, covers_everything
from closecall.backends import flex
from closecall.checks import check_scale
from closecall.geometry import Geometry, plan
from closecall.info import DTYPES
from closecall.policy import Policy, accepted, policy
from closecall.selection import Selection

from ...spine import inputs, numbers
from ...spine.results import Facts
from ...spine.timing import Contender, Samples, interleave
from . import draws, launched, rivals, spot, verdict
from .behaviour import PRESETS
from .check import WrongAnswerError
from .device import Device
from .graphs import first_line, same_bits

REST, FLEX, OURS = "rest of the layer", "flex", "dense"
FLEX_POLICY = "router-on-quest"  # whose kept blocks FlexAttention gets
CONTENDERS = (*PRESETS, FLEX)
DENSE = (*rivals.DENSE, OURS)
GRAPH = "{}, from a graph"  # the name under which a contender's replays are timed
Steps = dict[str, dict[str, Callable[..., Any]]]  # by contender, and by step
WORKSPACE = 64 * 2**20  # of the libraries that multiply matrices
ROWS = 4096  # the rest of the layer takes this many rows at a time


@dataclass(frozen=True)
class Speed:
    """What to time. A layer's hidden size is heads * dim, as in the paper's models."""

    contexts: tuple[int, ...]
    dtype: str
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    budget: int
    contenders: tuple[str, ...]
    repeats: int
    seconds: float
    inputs: tuple[str, ...] = draws.KINDS

    def cells(self) -> list[Facts]:
        lists = ("contexts", "contenders", "inputs")
        shared = {f: getattr(self, f) for f in self.__dataclass_fields__ if f not in lists}
        found = [(n, kind) for n in sorted(self.contexts) for kind in self.inputs]
        return [{"context": n, "inputs": kind, **shared, "contenders": self._of(kind)} for n, kind in found]

    def _of(self, kind: str) -> list[str]:
        """FlexAttention takes long to compile: once a context is enough."""
        return [name for name in self.contenders if name != FLEX or kind == self.inputs[0]]

    @functools.cached_property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(
            policy(name, **accepted(name, {"budget": self.budget})) for name in PRESETS if name in self.contenders
        )

    def check(self) -> None:
        """Raises ValueError where a budget leaves no room beside the forced blocks."""
        for p in self.policies:
            for n in self.contexts:
                check_room(p, plan(1, n, n, p.block, p.tile))


def label(cell: Facts) -> str:
    return (
        f"timing {numbers.size(cell['context'])} {cell['inputs']} {cell['dtype']} D={cell['dim']}, "
        f"{cell['heads']} heads on {cell['kv_heads']}"
    )


def bytes_needed(cell: Facts, backend: str, graphs: bool = False) -> int:
    """The most that measuring the cell allocates at once, from above; with graphs, which have memory of their own."""
    n, heads, kv_heads, dim = (int(cell[key]) for key in ("context", "heads", "kv_heads", "dim"))
    budget, intermediate = int(cell["budget"]), int(cell["intermediate"])
    size, hidden = DTYPES[cell["dtype"]].itemsize, heads * dim
    q, kv = heads * n * dim * size, 2 * kv_heads * n * dim * size
    drawn = 4 * heads * n * dim  # numbers are drawn in float32, one tensor at a time
    repeated = 2 * q  # keys and values, for SDPA kernels that know no grouped heads
    tiles = blocks = -(-n // 64)
    table = heads * tiles * blocks
    scores = table * (48 if backend in ("flex", "reference") else 8)  # the former sort whole tables
    flex_tables = table * 24 if FLEX in cell["contenders"] else 0
    index = 32 * heads * tiles * min(blocks, 4 * budget)
    weights = hidden * (2 * hidden + 2 * kv_heads * dim + 3 * intermediate) * size
    activations = min(ROWS, n) * (4 * hidden + 3 * intermediate) * size
    tensors = q + kv + max(drawn, repeated) + weights + activations
    working = q + max(scores, flex_tables) + index + WORKSPACE
    # Cells are held against float64 on the CPU: a tile's logits, their bounds and what is between, and its keys.
    spots = 0 if graphs else 8 * n * (12 * 64 + 6 * dim)
    return tensors + working * (2 if graphs else 1) + spots


@dataclass(frozen=True, eq=False)
class Layer:
    """The matrix products of a decoder layer other than attention, over the whole context."""

    x: Tensor
    attended: Tensor
    qkv: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    context: int

    @classmethod
    def of(cls, cell: Facts, place: torch.device) -> Layer:
        heads, dim, dtype = cell["heads"], cell["dim"], DTYPES[cell["dtype"]]
        hidden, wide, rows = heads * dim, cell["intermediate"], min(ROWS, cell["context"])
        generator = torch.Generator(place).manual_seed(inputs.SEED)

        def draw(a: int, b: int, spread: float) -> Tensor:
            return torch.empty(a, b, dtype=dtype, device=place).normal_(0.0, spread, generator=generator)

        small = hidden**-0.5
        return cls(
            draw(rows, hidden, 1.0), draw(rows, hidden, 1.0), draw(hidden, (heads + 2 * cell["kv_heads"]) * dim, small),
            draw(hidden, hidden, small), draw(hidden, wide, small), draw(hidden, wide, small),
            draw(wide, hidden, wide**-0.5), cell["context"],
        )  # fmt: skip

    def run(self) -> None:
        for start in range(0, self.context, ROWS):
            n = min(ROWS, self.context - start)
            x = self.x[:n]
            x @ self.qkv
            x = self.attended[:n] @ self.out
            (silu(x @ self.gate) * (x @ self.up)) @ self.down


@dataclass(frozen=True, eq=False)
class Ours:
    """One policy on our backend, as `closecall.attention` runs it, with selection and attention as steps."""

    policy: Policy
    backend: backends.Backend
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def geometry(self) -> Geometry:
        return plan(1, self.q.shape[2], self.k.shape[2], self.policy.block, self.policy.tile)

    @property
    def scale(self) -> float:
        return check_scale(None, self.q.shape[3])

    def steps(self) -> dict[str, Callable[..., object]]:
        if covers_everything(self.policy, self.geometry):
            return {"": self.attend}
        return {"select": lambda _: self.select(), "attend": self.attend}

    def select(self) -> Selection | None:
        return PlannedCall(self.q, self.k, self.policy, self.geometry, self.scale, self.backend).select()

    def attend(self, kept: Selection | None) -> Tensor:
        return self.backend.attend(self.q, self.k, self.v, kept, self.geometry, self.scale)[0]

    def facts(self, device: Device) -> Facts:
        """What is kept, as a share of the work of dense attention and in blocks, and how right some cells are."""
        kept = self.select()
        grid = self.policy.block, self.policy.tile
        out = self.attend(kept)
        spots = spot.check(self.q, self.k, self.v, kept, out, grid, self.scale, device, self.policy.name)
        kept = None if kept is None else kept.to("cpu")
        heads, dim, value_dim = self.q.shape[1], self.q.shape[3], self.v.shape[3]
        mine, whole = (inputs.flops(x, self.geometry, heads, dim, value_dim) for x in (kept, None))
        budget = None if kept is None else kept.effective_budget
        beside = None if kept is None else draws.together(kept.kv_idx, kept.counts)
        return {"kept": mine / whole, "effective_budget": budget, "together": beside, "spots": spots}


def measure(cell: Facts, settings: Speed, device: Device, backend: str) -> Facts:
    """Milliseconds, ratios and memory of every contender in the cell."""
    shape = (cell["heads"], cell["kv_heads"], cell["context"], cell["dim"])
    q, k, v = (x.to(device.place) for x in draws.tensors(cell["inputs"], *shape, cell["dtype"]))
    if FLEX in cell["contenders"]:
        torch.compiler.reset()  # every cell is another shape, and torch stops compiling after a few
    dense, missing = rivals.there(q, k, v, device, FLEX in cell["contenders"])
    layer = Layer.of(cell, device.place)
    ours = {p.name: Ours(p, backends.choose(backend, q), q, k, v) for p in settings.policies}
    steps: Steps = {name: {"": lambda _, call=call: call()} for name, call in dense.items()}
    steps |= {name: mine.steps() for name, mine in ours.items()}
    if FLEX in cell["contenders"]:
        try:
            run = _flex(q, k, v, settings.budget, backend)
            steps[FLEX] = {"": lambda _: run()}
        except (RuntimeError, ValueError, NotImplementedError) as error:  # no compiler, say: the others still run
            if device.is_lost() or isinstance(error, torch.OutOfMemoryError):
                raise
            missing[FLEX] = first_line(error)
    contenders = [device.contender(REST, {"": lambda _: layer.run()})]
    contenders += [device.contender(name, of) for name, of in steps.items()]
    for contender in contenders:
        for _ in range(device.warm_ups):
            contender.run()
    replayed, unreplayed = _from_graphs(steps, ours, device) if device.is_gpu else ([], {})
    samples = interleave([*contenders, *replayed], seconds=settings.seconds, most_rounds=settings.repeats)
    best = min(dense, key=samples.median)
    facts: Facts = {"rounds": samples.rounds, "rest_ms": 1000 * samples.median(REST), "best_dense": best}
    facts |= {"missing": missing, "no_graph": unreplayed, "rows": []}
    for contender in contenders[1:]:
        row = _row(contender, samples, device, best)
        if contender.name in ours:
            row |= ours[contender.name].facts(device)
            row["kernels"] = launched.by(contender.run) if device.is_gpu else []
        facts["rows"].append(row)
    busy = contenders[-1]
    facts["hardware"] = device.under_load(busy.run, samples.median(busy.name))
    return facts


def _whole(steps: Mapping[str, Callable[..., Any]]) -> Callable[[], Any]:
    def call() -> Any:
        result = None
        for step in steps.values():
            result = step(result)
        return result

    return call


def _from_graphs(steps: Steps, ours: Mapping[str, object], device: Device) -> tuple[list[Contender], dict[str, str]]:
    """Every contender once more, as replays of a graph; and why some cannot be. Ours must give the same bits."""
    pool, found, problems = device.graph_pool(), [], {}
    for name, of in steps.items():
        try:
            replay, captured = pool.capture(_whole(of))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if device.is_lost():
                raise
            problems[name] = first_line(error)
            continue
        if name in ours:
            replay()
            if not same_bits(captured, _whole(of)()):
                raise WrongAnswerError(f"{name} replayed from a graph does not give what a plain call gives")
        del captured
        found.append(device.contender(GRAPH.format(name), {"": lambda _, replay=replay: replay()}))  # type: ignore[misc]
    return found, problems


def _flex(q: Tensor, k: Tensor, v: Tensor, budget: int, backend: str) -> Callable[[], Tensor]:
    mine = Ours(policy(FLEX_POLICY, budget=budget), backends.choose(backend, q), q, k, v)
    return flex.compiled(q, k, v, mine.select(), mine.geometry, mine.scale)


def _row(contender: Contender, samples: Samples, device: Device, best: str) -> Facts:
    name = contender.name
    mine, rest, dense = samples.seconds(name), samples.seconds(REST), samples.seconds(best)
    extra = device.extra_bytes(lambda: contender.run()[1], samples.extra_bytes[name])
    selects = "select" in contender.steps
    row: Facts = {
        "name": name,
        "ms": 1000 * samples.median(name),
        "select_ms": 1000 * samples.median(name, "select") if selects else None,
        "select_share": samples.share(name, "select") if selects else None,
        "over_dense": samples.ratio(name, best),
        "over_our_dense": samples.ratio(name, OURS),
        "speedup": None if name in DENSE else verdict.speedup(_rivals(samples, "{}"), mine),
        "share": statistics.median(a / (a + r) for a, r in zip(mine, rest, strict=True)),
        "wall": statistics.median((a + r) / (d + r) for a, r, d in zip(mine, rest, dense, strict=True)),
        "extra_mib": None if extra is None else extra / 2**20,
        "graph_ms": None,
        "graph_speedup": None,
    }
    if (graph := GRAPH.format(name)) in samples.laps:
        row["graph_ms"] = 1000 * samples.median(graph)
        if name not in DENSE and (against := _rivals(samples, GRAPH)):
            row["graph_speedup"] = verdict.speedup(against, samples.seconds(graph))
    return row


def _rivals(samples: Samples, form: str) -> dict[str, list[float]]:
    """Seconds of everybody's dense attention, ours too, by name."""
    return {name: samples.seconds(form.format(name)) for name in DENSE if form.format(name) in samples.laps}
