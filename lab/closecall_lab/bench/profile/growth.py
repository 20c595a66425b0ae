"""`closecall profile --growth`: attention + selection over context, on a part of one layer's heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from closecall.backends import cpu
from closecall.hf.attach import Handle
from closecall.models.shapes import Shape

from ...spine import inputs
from ...spine.results import Facts
from ...spine.table import Table
from ..validate.device import Cpu, Device
from . import growth_report, layer
from .model_run import attached, clock, kept, mebibytes
from .shapes import Measured, check_room
from .turns import Prefill, take_turns
from .variants import Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class GrowthBench:
    """Every context and type is a cell; all policies take turns in it. Nothing is multiplied."""

    shape: Shape
    contexts: tuple[int, ...]
    dtypes: tuple[str, ...]
    variants: tuple[Variant, ...]
    threads: tuple[int, ...]
    rounds: int
    q_heads: int
    kv_heads: int
    name: str = "growth"
    device: Device = field(default_factory=Cpu)

    def __post_init__(self) -> None:
        part = Measured(self.q_heads, self.kv_heads, self.q_heads, rows=0)
        for dtype in self.dtypes:
            for context in self.contexts:
                check_room(self.shape, context, dtype, part, self.device)

    def cells(self) -> list[Facts]:
        import transformers

        heads = f"{self.q_heads} query heads on {self.kv_heads} key head{'s' if self.kv_heads > 1 else ''}"
        shared = {
            "what": "growth",
            "model": self.shape.name,
            "label": f"{heads} of {self.shape.name}'s head dim {self.shape.head_dim}",
            "heads": [self.q_heads, self.kv_heads],
            "device": self.device.facts()["device"],
            "transformers": transformers.__version__,
            "variants": [v.to_json() for v in self.variants],
            "tier": cpu.tier() if cpu.tiers() else None,
            "rounds": self.rounds,
        }
        return [
            {"context": n, "dtype": dtype, "threads": t, **shared}
            for n in sorted(self.contexts)
            for t in self.threads
            for dtype in self.dtypes
        ]

    def label(self, cell: Facts) -> str:
        return f"{inputs.size(cell['context'])} {cell['dtype']}, {inputs.threads(cell['threads'])}"

    def guess(self, cell: Facts) -> float:
        pairs = self.q_heads * cell["context"] * min(cell["context"], 6000 + cell["context"] / 32)
        return float(self.rounds * len(self.variants) * 4 * pairs * self.shape.head_dim / (80e9 * cell["threads"]))

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        heads = (self.q_heads, self.kv_heads)
        model = layer.attention_only(self.shape, *heads, cell["context"], cell["dtype"], self.device.place)
        call = layer.prefill(model, layer.embeddings(model, cell["context"]))
        told: dict[str, Handle] = {}
        at = clock(self.device)
        contenders = [Prefill.named(v.name, attached(model, call, at, v, told)) for v in self.variants]
        samples = take_turns(contenders, self.rounds, self.device)
        return {
            "rounds": samples.rounds,
            "laps": samples.laps,
            "kept": kept(told),
            "extra_mib": mebibytes(samples),
            "measured": [f"Measured: selection and attention of {cell['label']}; nothing is multiplied."],
        }

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table:
        return growth_report.table(machine, measured)

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Figure]:
        return {self.name: growth_report.figure(machine, measured)}
