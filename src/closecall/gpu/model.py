"""A model on paper of prefill time. Nothing in it is measured by us, and no figure it gives is a measurement.

Every component takes the longest of its bounds (tensor cores, device memory, L2, exponentials), each reached to a
stated share, plus a fixed time per launch. The shares are either fitted on figures of the paper (`published.py` says
which) or taken from elsewhere and said to be. What the compile report adds is how many thread blocks of the attention
kernel share a multiprocessor: with one, its stages take turns; with more, one's products hide another's softmax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..backends.gpu.launch import MEAN_PARTS
from ..policy import Policy, unknown
from ..scorers import Quest
from .devices import Device
from .shapes import Shape
from .work import Work, count

LABEL = "a model on paper, not a measurement"
WAYS = ("sdpa", "paper", "ours")

ELEMENT = 2  # bytes of bf16, the only type modelled
LAUNCH_MS = 0.004
MEMORY_SHARE = 0.85
HOPPER_FLASH2 = 0.35
HOPPER_FLASH3 = 0.75
# Float32 operations per score in the softmax of one key block: scale and shift, maximum, sum, conversion.
SCORE_OPERATIONS = 5
# Clocks until the first byte of a load arrives; matters only to a loop that is not pipelined.
LATENCY = 600
# Passes over a tile's scores, packed with their block in 8 bytes: written, read for each of eight radix digits of the
# top-k, and read to gather what it chose.
SCORE_BYTES = 8
RANK_PASSES = 9

ASSUMED = (
    f"streaming kernels reach {MEMORY_SHARE:.0%} of the memory bandwidth",
    f"a launch costs {1000 * LAUNCH_MS:g} microseconds",
    f"dense attention on Hopper reaches {HOPPER_FLASH2:.0%} of the tensor peak with FlashAttention-2, taken for what "
    f"SDPA ran there, and {HOPPER_FLASH3:.0%} with FlashAttention-3 (Shah et al. 2024, abstract)",
    "linear layers reach the same share of the peak on every device",
    "the paper's kernel relates to dense attention on Hopper as it does on the A100",
    f"our top-k reads the tile scores {RANK_PASSES} times",
    "our kernels reach, of their own bound, something between what the paper's kernel and what dense attention reach "
    "of the tensor peak on the A100: predictions give both ends",
)


@dataclass(frozen=True)
class Occupancy:
    """What the compile report says of the attention kernel: thread blocks per multiprocessor, whether the loop is
    pipelined, and the queries and keys of one turn of it."""

    blocks: int
    pipelined: bool
    rows: int = 64
    keys: int = 64

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"a kernel of which {self.blocks} thread blocks fit cannot run: see closecall gpu-report")
        if self.rows < 1 or self.keys < 1:
            raise ValueError(f"a turn of the loop needs queries and keys, got {self.rows} x {self.keys}")

    def to_dict(self) -> dict[str, Any]:
        return {"blocks": self.blocks, "pipelined": self.pipelined, "rows": self.rows, "keys": self.keys}


@dataclass(frozen=True)
class Shares:
    """How much of each bound is reached."""

    dense: dict[str, float]  # dense attention, of the tensor peak, by target
    linear: float
    mixed: float  # linear layers of mixed models
    paper_kernel: float  # the paper's attention kernel, relative to dense attention
    paper_passes: float  # over its [rows, blocks] scores
    reach: float  # our kernels, of their own bound

    def cautious(self) -> Shares:
        """As if our kernels reached of their bound only what the paper's kernel reached of the tensor peak."""
        return dataclasses.replace(self, reach=self.paper_kernel * self.dense["sm_80"])

    def flash3(self) -> Shares:
        """With dense attention on Hopper by FlashAttention-3."""
        return dataclasses.replace(self, dense=self.dense | {"sm_90": HOPPER_FLASH3})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Component:
    """One part of a layer's time, in milliseconds, and what bounds it."""

    name: str
    ms: float
    bound: str
    flops: float = 0.0
    bytes: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ms": self.ms, "bound": self.bound, "flops": self.flops, "bytes": self.bytes}


def component(
    name: str, device: Device, *, flops: float = 0.0, share: float = 1.0, memory: float = 0.0, launches: int = 1
) -> Component:
    """The roofline: the longer of computing and moving, plus the launches."""
    computing = 1e3 * flops / (device.tensor_tflops * 1e12 * share)
    moving = 1e3 * memory / (device.bandwidth * 1e12 * MEMORY_SHARE)
    starting = launches * LAUNCH_MS
    bounds = {"tensor cores": computing, "memory": moving, "launches": starting}
    return Component(
        name, max(computing, moving) + starting, max(bounds, key=lambda b: bounds[b]), flops=flops, bytes=memory
    )


@dataclass(frozen=True)
class Step:
    """Clocks that one multiprocessor's units need for one turn of the attention loop."""

    tensor: float
    exps: float
    lanes: float
    l2: float

    def clocks(self, occupancy: Occupancy) -> float:
        """Blocks of a multiprocessor hide each other's stages; one block's own stages take turns. Copies that run
        ahead of the loop cost nothing until they are the slowest; others are a stage too, after a latency."""
        stages = self.tensor + self.exps + self.lanes
        if not occupancy.pipelined:
            stages += self.l2 + 2 * LATENCY
        return max(self.tensor, self.exps, self.lanes, self.l2, stages / occupancy.blocks)

    def bound(self, occupancy: Occupancy) -> str:
        units = {"tensor cores": self.tensor, "exponentials": self.exps, "float32": self.lanes, "L2": self.l2}
        slowest = max(units, key=lambda u: units[u])
        return slowest if units[slowest] >= self.clocks(occupancy) else "occupancy"


def step(device: Device, *, rows: int, keys: int, head_dim: int) -> Step:
    per_clock = device.tensor_tflops * 1e12 / (device.multiprocessors * device.ghz * 1e9)
    return Step(
        tensor=4 * rows * keys * head_dim / per_clock,
        exps=rows * keys / device.exps_per_clock,
        lanes=(SCORE_OPERATIONS * rows * keys + rows * head_dim) / device.lanes,
        l2=2 * keys * head_dim * ELEMENT * device.multiprocessors / device.l2_bytes_per_clock,
    )


def attention(
    device: Device, shape: Shape, policy: Policy, work: Work, shares: Shares, occupancy: Occupancy
) -> Component:
    """Ours, over the kept blocks."""
    rows, keys = min(occupancy.rows, policy.tile), min(occupancy.keys, policy.block)
    one = step(device, rows=rows, keys=keys, head_dim=shape.head_dim)
    turns = math.ceil(policy.tile / rows) * math.ceil(policy.block / keys)
    steps = shape.q_heads * work.kept * turns / device.multiprocessors
    ms = 1e3 * steps * one.clocks(occupancy) / (device.ghz * 1e9 * shares.reach)
    pairs = shape.q_heads * work.kept * policy.tile * policy.block
    streamed = 2 * work.context * (shape.q_heads + shape.kv_heads) * shape.head_dim * ELEMENT
    moving = 1e3 * streamed / (device.bandwidth * 1e12 * MEMORY_SHARE)
    bound = one.bound(occupancy) if ms > moving else "memory"
    return Component(
        "attention over kept blocks", max(ms, moving) + LAUNCH_MS, bound, flops=4 * pairs * shape.head_dim,
        bytes=streamed,
    )  # fmt: skip


def everywhere(device: Device, shape: Shape, context: int, shares: Shares) -> list[Component]:
    """What a layer does besides attention, whatever the policy; the mean over layers where they differ."""
    share = shares.mixed if shape.mixed else shares.linear
    weights = shape.weights / shape.layers
    linear = component(
        "linear layers", device, flops=2 * weights * context, share=share, memory=weights * ELEMENT, launches=7
    )
    # Eager torch, counted from transformers' code in bytes per number: two norms in float32 steps and two residual
    # sums over the hidden size, the rotary embedding over q and k, the activation and its product over the MLP.
    rotated = (shape.q_heads + shape.kv_heads) * shape.head_dim
    passed = 84 * shape.hidden + 20 * rotated + 10 * shape.intermediate
    return [linear, component("everything else", device, memory=context * passed, launches=30)]


def dense(device: Device, shape: Shape, context: int, share: float) -> Component:
    pairs = shape.q_heads * context * (context + 1) / 2
    return component("dense attention", device, flops=4 * pairs * shape.head_dim, share=share)


def _paper(device: Device, shape: Shape, policy: Policy, work: Work, shares: Shares) -> list[Component]:
    """The paper's own code: [rows, blocks] scores in bf16 in memory, and a kernel that is not pipelined."""
    scores = shape.q_heads * work.context * work.blocks * ELEMENT
    pairs = shape.q_heads * work.kept * policy.tile * policy.block
    return [
        component("selection", device, memory=scores * shares.paper_passes, launches=30),
        component(
            "attention over kept blocks",
            device,
            flops=4 * pairs * shape.head_dim,
            share=shares.paper_kernel * shares.dense[device.arch],
        ),
    ]


def _select(device: Device, shape: Shape, policy: Policy, work: Work, shares: Shares) -> list[Component]:
    """Ours: summaries, tile scores with the row maximum inside, and the ranking between them."""
    # Minimum and maximum; or the mean, in as many parts as it takes to keep what bf16 alone would round away.
    parts = 2 if isinstance(policy.scorer, Quest) else MEAN_PARTS["bf16"][0]
    keys = shape.kv_heads * work.context * shape.head_dim * ELEMENT
    summaries = parts * keys / policy.block
    cells = SCORE_BYTES * shape.q_heads * work.tiles * work.blocks
    queries = shape.q_heads * work.context * shape.head_dim * ELEMENT
    products = 2 * parts * shape.q_heads * work.visible * policy.tile * shape.head_dim
    return [
        component("block summaries", device, memory=keys + summaries),
        component("tile scores", device, flops=products, share=shares.reach, memory=queries + summaries + cells),
        component("top-k and trigger", device, memory=cells * RANK_PASSES, launches=30),
    ]


@dataclass(frozen=True)
class Prediction:
    """One model, device, context, policy and way to run it. `layer` is a full-attention layer."""

    shape: Shape
    device: Device
    context: int
    policy: Policy
    way: str
    layer: Sequence[Component]
    shared: Sequence[Component]  # of them, those that every layer has
    work: Work

    @property
    def attention_ms(self) -> float:
        """Per full-attention layer: selection and attention."""
        return math.fsum(c.ms for c in self.layer if c not in self.shared)

    @property
    def layer_ms(self) -> float:
        return math.fsum(c.ms for c in self.layer)

    @property
    def prefill_ms(self) -> float:
        common = math.fsum(c.ms for c in self.shared)
        return self.shape.layers * common + self.shape.full_layers * self.attention_ms

    @property
    def attention_share(self) -> float:
        return self.shape.full_layers * self.attention_ms / self.prefill_ms

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": LABEL,
            "model": self.shape.name,
            "device": self.device.name,
            "context": self.context,
            "policy": self.policy.name,
            "way": self.way,
            "kept_share": self.work.kept / self.work.visible,
            "components": [c.to_dict() for c in self.layer],
            "attention_ms": self.attention_ms,
            "layer_ms": self.layer_ms,
            "prefill_ms": self.prefill_ms,
            "attention_share": self.attention_share,
        }


def check_known(policy: Policy) -> None:
    """ValueError for policies whose selection the model has no counts of."""
    scorer = policy.scorer
    if scorer is not None and (scorer.name not in ("mean", "quest") or policy.aggregate not in ("max", "mean")):
        raise ValueError(
            "the model knows the scorers mean and quest under max and mean, "
            f'not {scorer.name} under {policy.aggregate}: name a preset like "router-on-quest"'
        )


def predict(
    shape: Shape,
    device: Device,
    context: int,
    policy: Policy,
    way: str,
    shares: Shares,
    occupancy: Occupancy | None = None,
) -> Prediction:
    """`way`: "sdpa" is dense attention by torch, "paper" the paper's code, "ours" these kernels (needs `occupancy`)."""
    if way not in WAYS:
        raise unknown("way", way, WAYS)
    check_known(policy)
    work = count(policy, context)
    shared = everywhere(device, shape, context, shares)
    if way == "sdpa":
        if policy.scorer is not None:
            raise ValueError(f"SDPA runs dense attention only, not {policy.name!r}")
        own = [dense(device, shape, context, shares.dense[device.arch])]
    elif way == "paper":
        if policy.scorer is None:
            raise ValueError("the paper's code ran dense attention by SDPA: model that")
        own = _paper(device, shape, policy, work, shares)
    else:
        if occupancy is None:
            raise ValueError("our kernels' time needs their occupancy from the compile report")
        own = _select(device, shape, policy, work, shares) if work.selects else []
        own = [*own, attention(device, shape, policy, work, shares, occupancy)]
    return Prediction(shape, device, context, policy, way, [*shared, *own], shared, work)
