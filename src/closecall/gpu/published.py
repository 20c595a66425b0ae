"""The paper's published times, what the model on paper is fitted to among them, and its error on all the others.

Five shares are fitted, each by one division on one figure; the figures they come from are marked as fitted, those that
follow from fitted ones by arithmetic as implied, and only the rest, held out, test the model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..policy import Policy, policy
from . import model
from .devices import device
from .model import ELEMENT, HOPPER_FLASH2, LAUNCH_MS, MEMORY_SHARE, Shares, predict
from .shapes import shape
from .work import count

KIB = 1024
DENSE = policy("dense")
ROUTER = policy("router")
TOPK = policy("topk")
LAYER_TIMES = "the paper's profile, A100, qwen2.5-7b-1m at 128K, per layer"
PARETO = "the paper, Speed-quality Pareto"
PCH = "the paper, appendix PCH (its wall times hold more than the prefill)"
ROLES = ("fitted", "implied", "held out")

# Figures that shares are fitted on.
DENSE_MS, SELECTION_MS, KERNEL_MS = 463.0, 69.0, 121.0
SHARE_7B_128K = 0.63
SHARE_MIXED_64K = 0.19


@dataclass(frozen=True)
class Figure:
    """A published figure and what the model makes of it."""

    name: str
    role: str
    unit: str
    published: float
    modelled: float
    source: str

    @property
    def error(self) -> float:
        """Relative to the published figure."""
        return self.modelled / self.published - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "unit": self.unit,
            "published": self.published,
            "modelled": self.modelled,
            "error": self.error,
            "source": self.source,
        }


@functools.cache
def fitted() -> Shares:
    """Every share from one figure, in closed form: no search, nothing to tune."""
    a100, seven = device("A100"), shape("qwen2.5-7b-1m")
    n = 128 * KIB
    peak = a100.tensor_tflops * 1e9  # FLOP per millisecond
    work = count(ROUTER, n)

    flops = 4 * seven.q_heads * n * (n + 1) / 2 * seven.head_dim
    dense = flops / peak / (DENSE_MS - LAUNCH_MS)

    pairs = seven.q_heads * work.kept * ROUTER.tile * ROUTER.block
    kernel = 4 * pairs * seven.head_dim / peak / (KERNEL_MS - LAUNCH_MS)

    scores = seven.q_heads * n * work.blocks * ELEMENT
    bandwidth = a100.bandwidth * 1e9 * MEMORY_SHARE  # bytes per millisecond
    passes = (SELECTION_MS - 30 * LAUNCH_MS) * bandwidth / scores

    unit = Shares(dense={"sm_80": dense, "sm_90": HOPPER_FLASH2}, linear=1.0, mixed=1.0,
                  paper_kernel=kernel / dense, paper_passes=passes, reach=dense)  # fmt: skip
    elsewhere = DENSE_MS * (1 - SHARE_7B_128K) / SHARE_7B_128K  # milliseconds per layer outside attention
    linear, other = model.everywhere(a100, seven, n, unit)
    starting = 7 * LAUNCH_MS
    linear_share = (linear.ms - starting) / (elsewhere - other.ms - starting)

    h200, mixed, n = device("H200"), shape("qwen3.6-35b"), 64 * KIB
    attention = mixed.full_layers * model.dense(h200, mixed, n, HOPPER_FLASH2).ms
    elsewhere = attention * (1 - SHARE_MIXED_64K) / SHARE_MIXED_64K / mixed.layers
    linear, other = model.everywhere(h200, mixed, n, unit)
    mixed_share = (linear.ms - starting) / (elsewhere - other.ms - starting)
    return Shares(dense=unit.dense, linear=linear_share, mixed=mixed_share,
                  paper_kernel=unit.paper_kernel, paper_passes=passes, reach=dense)  # fmt: skip


def _wall(name: str, device_name: str, context: int, chosen: Policy) -> float:
    """The paper's code over SDPA."""
    where, what, shares = device(device_name), shape(name), fitted()
    paper = predict(what, where, context, chosen, "paper", shares)
    return paper.prefill_ms / predict(what, where, context, DENSE, "sdpa", shares).prefill_ms


def _share(name: str, device_name: str, context: int) -> float:
    return predict(shape(name), device(device_name), context, DENSE, "sdpa", fitted()).attention_share


def _kernel(context: int, chosen: Policy) -> float:
    """Milliseconds per layer in the paper's attention kernel."""
    found = predict(shape("qwen2.5-7b-1m"), device("A100"), context, chosen, "paper", fitted())
    return found.layer[-1].ms


def _layer_times() -> list[Figure]:
    seven, a100, n = shape("qwen2.5-7b-1m"), device("A100"), 128 * KIB
    paper = predict(seven, a100, n, ROUTER, "paper", fitted())
    found = {"dense attention": (DENSE_MS, predict(seven, a100, n, DENSE, "sdpa", fitted()).attention_ms)}
    found["router's selection"] = (SELECTION_MS, paper.layer[-2].ms)
    found["router's kernel"] = (KERNEL_MS, paper.layer[-1].ms)
    return [Figure(f"{name}, 7B-1M at 128K", "fitted", "ms", *pair, LAYER_TIMES) for name, pair in found.items()]


def _pareto() -> list[Figure]:
    panels = (
        ("qwen2.5-7b-1m", "7B-1M", "A100", (0.31, 0.45, 0.63), (1.09, 0.87, 0.62)),
        ("qwen3.6-35b", "Qwen3.6", "H200", (0.11, 0.19, 0.37), (1.12, 1.00, 0.80)),
    )
    found = []
    for name, short, where, shares, walls in panels:
        for size, share in zip((32, 64, 128), shares, strict=True):
            used = (name, size) in (("qwen2.5-7b-1m", 128), ("qwen3.6-35b", 64))
            role = "fitted" if used else "held out"
            modelled = _share(name, where, size * KIB)
            found.append(Figure(f"attention's share, {short} at {size}K", role, "", share, modelled, PARETO))
        for size, wall in zip((32, 64, 128), walls, strict=True):
            role = "implied" if (name, size) == ("qwen2.5-7b-1m", 128) else "held out"
            modelled = _wall(name, where, size * KIB, ROUTER)
            found.append(Figure(f"router's wall over dense, {short} at {size}K", role, "x", wall, modelled, PARETO))
    for size, ratio in ((32, 1.53), (64, 1.47)):
        modelled = _kernel(size * KIB, ROUTER) / _kernel(size * KIB, TOPK)
        found.append(Figure(f"router's kernel over top-k's, {size}K", "held out", "x", ratio, modelled, PARETO))
    return found


def _pch() -> list[Figure]:
    """Another model on the same device: dense seconds, and wall ratios of top-k and of a router with q = 0.1."""
    where, what = device("A100"), shape("qwen2.5-14b")
    found = []
    for size, budget, seconds, topk, router in (
        (8, 29, 1.4, 1.14, 1.14),
        (32, 40, 6.9, 0.88, 0.96),
        (64, 40, 17.5, 0.81, 0.85),
    ):
        n = size * KIB
        modelled = predict(what, where, n, DENSE, "sdpa", fitted()).prefill_ms / 1e3
        found.append(Figure(f"dense prefill, 14B at {size}K", "held out", "s", seconds, modelled, PCH))
        for label, value, chosen in (
            ("top-k", topk, policy("topk", budget=budget)),
            ("router q=0.1", router, policy("router", budget=budget, q=0.1)),
        ):
            modelled = _wall("qwen2.5-14b", "A100", n, chosen)
            found.append(Figure(f"{label}'s wall over dense, 14B at {size}K", "held out", "x", value, modelled, PCH))
    return found


@functools.cache
def check() -> Sequence[Figure]:
    """Every published figure the model can speak to, the fitted ones first."""
    found = [*_layer_times(), *_pareto(), *_pch()]
    return tuple(sorted(found, key=lambda figure: ROLES.index(figure.role)))


def mean_error(figures: Sequence[Figure]) -> float:
    """Mean absolute relative error."""
    return sum(abs(f.error) for f in figures) / len(figures)
