"""Times our kernels and their rivals at one context, in turn, in one loop, beside the rest of a decoder layer.

The paper reports attention's share of a prefill and the wall time against dense. Both need the rest of the model: here
it is the matrix products of one layer (projections and a gated MLP), timed in the same rounds. Norms, rotary embedding
and the residual sums are left out, so shares are a little high.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

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
from . import spot, verdict
from .cases import POLICIES
from .device import Device, first_line

SDPA, REST, FLEX = "sdpa", "rest of the layer", "flex"
FLEX_POLICY = "router-on-quest"  # whose kept blocks FlexAttention gets
CONTENDERS = (*POLICIES, FLEX)
DENSE = (SDPA, "dense")
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

    def cells(self) -> list[Facts]:
        shared = {f: getattr(self, f) for f in self.__dataclass_fields__ if f not in ("contexts", "contenders")}
        return [{"context": n, **shared, "contenders": list(self.contenders)} for n in sorted(self.contexts)]

    @functools.cached_property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(
            policy(name, **accepted(name, {"budget": self.budget})) for name in POLICIES if name in self.contenders
        )

    def check(self) -> None:
        """Raises ValueError where a budget leaves no room beside the forced blocks."""
        for p in self.policies:
            for n in self.contexts:
                check_room(p, plan(1, n, n, p.block, p.tile))


def label(cell: Facts) -> str:
    return (
        f"timing {numbers.size(cell['context'])} {cell['dtype']} D={cell['dim']}, "
        f"{cell['heads']} heads on {cell['kv_heads']}"
    )


def bytes_needed(cell: Facts, backend: str) -> int:
    """The most that measuring the cell allocates at once, from above."""
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
    tensors = 2 * q + kv + max(drawn, repeated) + weights + activations
    return tensors + max(scores, flex_tables) + index + WORKSPACE


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


def _grouped(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(kernel):  # an error rather than a fall back to a slow kernel
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return call


def _repeated(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return _grouped(kernel, q, wide_k, wide_v)


# The ways to run causal SDPA on a GPU. The last knows no grouped heads, but takes float32: its keys are repeated first.
FORMS = {
    "flash": functools.partial(_grouped, SDPBackend.FLASH_ATTENTION),
    "cudnn": functools.partial(_grouped, SDPBackend.CUDNN_ATTENTION),
    "memory-efficient, keys repeated beforehand": functools.partial(_repeated, SDPBackend.EFFICIENT_ATTENTION),
}


def sdpa_on_gpu(q: Tensor, k: Tensor, v: Tensor, device: Device) -> tuple[str, Callable[[], Tensor]]:
    """The form of SDPA that is fastest on the first keys, of those that run here."""
    first = [x[:, :, : inputs.PROBE_KEYS] for x in (q, k, v)]
    taken, problems = {}, []
    for name, form in FORMS.items():
        call = form(*first)
        contender = device.contender(name, {"": lambda _, call=call: call()})  # type: ignore[misc]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a kernel does not take these tensors
                laps = [sum(contender.run()[0].values()) for _ in range(9)]
        except RuntimeError as error:
            problems.append(f"{name}: {first_line(error)}")
        else:
            taken[name] = statistics.median(laps[2:])
    if not taken:
        raise RuntimeError(f"torch has no fast SDPA for these tensors ({'; '.join(problems)}): try another --dtype")
    best = min(taken, key=lambda name: taken[name])
    return best, FORMS[best](q, k, v)


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
        return {"kept": mine / whole, "effective_budget": budget, "spots": spots}


def measure(cell: Facts, settings: Speed, device: Device, backend: str) -> Facts:
    """Milliseconds, ratios and memory of every contender in the cell."""
    shape = (cell["heads"], cell["kv_heads"], cell["context"], cell["context"], cell["dim"])
    q, k, v = (x.to(device.place) for x in inputs.qkv(*shape, cell["dtype"]))
    form, sdpa = sdpa_on_gpu(q, k, v, device) if device.is_gpu else inputs.sdpa(q, k, v)
    layer = Layer.of(cell, device.place)
    ours = {p.name: Ours(p, backends.choose(backend, q), q, k, v) for p in settings.policies}
    contenders = [device.contender(SDPA, {"": lambda _: sdpa()}), device.contender(REST, {"": lambda _: layer.run()})]
    for name, mine in ours.items():
        contenders.append(device.contender(name, mine.steps()))
    facts: Facts = {"sdpa_form": form}
    if FLEX in settings.contenders:
        try:
            run = _flex(q, k, v, settings.budget, backend)
            contenders.append(device.contender(FLEX, {"": lambda _: run()}))
        except (RuntimeError, ValueError, NotImplementedError) as error:  # no compiler, say: the others still run
            if device.is_lost():
                raise
            facts["flex_problem"] = first_line(error)
    for contender in contenders:
        for _ in range(device.warm_ups):
            contender.run()
    samples = interleave(contenders, seconds=settings.seconds, most_rounds=settings.repeats)
    facts |= {"rounds": samples.rounds, "rest_ms": 1000 * samples.median(REST)}
    timed = [c for c in contenders if c.name != REST]
    facts["rows"] = [_row(c, samples, device) | (ours[c.name].facts(device) if c.name in ours else {}) for c in timed]
    return facts


def _flex(q: Tensor, k: Tensor, v: Tensor, budget: int, backend: str) -> Callable[[], Tensor]:
    torch.compiler.reset()  # every cell is another shape, and torch stops compiling after a few
    mine = Ours(policy(FLEX_POLICY, budget=budget), backends.choose(backend, q), q, k, v)
    return flex.compiled(q, k, v, mine.select(), mine.geometry, mine.scale)


def _row(contender: Contender, samples: Samples, device: Device) -> Facts:
    name = contender.name
    mine, rest, dense = samples.seconds(name), samples.seconds(REST), samples.seconds(SDPA)
    extra = device.extra_bytes(lambda: contender.run()[1], samples.extra_bytes[name])
    selects = "select" in contender.steps
    rivals = {d: samples.seconds(d) for d in DENSE if d in samples.laps}
    return {
        "name": name,
        "ms": 1000 * samples.median(name),
        "select_ms": 1000 * samples.median(name, "select") if selects else None,
        "select_share": samples.share(name, "select") if selects else None,
        "over_sdpa": samples.ratio(name, SDPA),
        "over_our_dense": samples.ratio(name, "dense"),
        "speedup": None if name in DENSE else verdict.speedup(rivals, mine),
        "share": statistics.median(a / (a + r) for a, r in zip(mine, rest, strict=True)),
        "wall": statistics.median((a + r) / (d + r) for a, r, d in zip(mine, rest, dense, strict=True)),
        "extra_mib": None if extra is None else extra / 2**20,
    }
