"""`closecall profile --model`: the whole prefill of a model, as it is, on our dense kernel, and with each policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from closecall.backends import cpu
from closecall.hf.attach import Handle, attach
from closecall.models.load import LoadedModel

from ...spine import inputs
from ...spine.results import Facts
from ...spine.table import Table
from ...spine.timing import Samples
from ..prefill import Summary, summary
from ..validate.device import Cpu, Device
from . import figures, report
from .parts import Clock, HostClock, Lap, StreamClock, split
from .shapes import refuse
from .turns import Prefill, take_turns
from .variants import UNATTACHED, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measured = list[tuple[Facts, Facts]]


def clock(device: Device) -> Clock:
    return StreamClock() if device.is_gpu else HostClock()


def unattached(model: Any, prefill: Callable[[], object], at: Clock) -> Callable[[], Lap]:
    return lambda: split(model, prefill, at)


def attached(
    model: Any, prefill: Callable[[], object], at: Clock, variant: Variant, told: dict[str, Handle]
) -> Callable[[], Lap]:
    """People attach once and call often, so attaching is no part of a prefill's time."""

    def timed() -> Lap:
        with attach(model, variant.policy) as handle:
            lap = split(model, prefill, at)
        told[variant.name] = handle
        return lap

    return timed


def kept(told: dict[str, Handle]) -> dict[str, Summary]:
    return {name: summary(handle) for name, handle in told.items()}


def mebibytes(samples: Samples) -> dict[str, float | None]:
    return {name: None if x is None else x / 2**20 for name, x in samples.extra_bytes.items()}


@dataclass(frozen=True)
class ModelProfile:
    """Every context and thread count is a cell; the unattached model and all policies take turns in it."""

    loaded: LoadedModel
    contexts: tuple[int, ...]
    variants: tuple[Variant, ...]
    threads: tuple[int, ...]
    rounds: int
    name: str = "profile"
    device: Device = field(default_factory=Cpu)

    def __post_init__(self) -> None:
        for context in self.contexts:
            refuse(f"{self.loaded.name} at {context} tokens", _bytes_needed(self.loaded.model, context), self.device)

    @property
    def warnings(self) -> list[str]:
        longer = self.loaded.longer_than_trained(self.contexts)
        if not longer:
            return []
        most, listed = self.loaded.context, ", ".join(map(inputs.size, longer))
        return [f"{self.loaded.name} was trained on {most} tokens: at {listed} times are times, but answers are none."]

    def cells(self) -> list[Facts]:
        import transformers

        loaded = self.loaded
        shared = {
            "what": "model",
            "model": loaded.name,
            "label": loaded.label,
            "fingerprint": loaded.fingerprint,
            "dtype": inputs.dtype_name(loaded.model.dtype),
            "device": self.device.facts()["device"],
            "unattached": loaded.model.config._attn_implementation,
            "transformers": transformers.__version__,
            "variants": [v.to_json() for v in self.variants],
            "tier": cpu.tier() if cpu.tiers() else None,
            "rounds": self.rounds,
        }
        return [{"context": n, "threads": t, **shared} for n in sorted(self.contexts) for t in self.threads]

    def label(self, cell: Facts) -> str:
        return f"{inputs.size(cell['context'])} {cell['dtype']}, {inputs.threads(cell['threads'])}"

    def guess(self, cell: Facts) -> float:
        config = self.loaded.model.config.get_text_config()
        attention = 2 * getattr(config, "hidden_size", 0) * getattr(config, "num_hidden_layers", 0) * cell["context"]
        once: float = 2 * (self.loaded.model.num_parameters() + attention) * cell["context"] / (80e9 * cell["threads"])
        return self.rounds * once * (1 + len(self.variants))

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        model, at = self.loaded.model, clock(self.device)
        call = _prefill(model, cell["context"])
        told: dict[str, Handle] = {}
        contenders = [
            Prefill.named(UNATTACHED, unattached(model, call, at)),
            *(Prefill.named(v.name, attached(model, call, at, v, told)) for v in self.variants),
        ]
        samples = take_turns(contenders, self.rounds, self.device)
        return {
            "rounds": samples.rounds,
            "laps": samples.laps,
            "kept": kept(told),
            "extra_mib": mebibytes(samples),
            "measured": ["The whole prefill, in one piece: nothing is multiplied."],
        }

    def table(self, machine: Facts, measured: Measured) -> Table:
        return report.walls(machine, measured, self.warnings)

    def figures(self, machine: Facts, measured: Measured) -> dict[str, Figure]:
        return figures.both(self.name, machine, measured)


def _prefill(model: Any, context: int) -> Callable[[], object]:
    """One call as `generate` makes it for a prompt: with a cache, and logits of the last token only."""
    generator = torch.Generator().manual_seed(inputs.SEED)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, context), generator=generator).to(model.device)
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return lambda: model(ids, use_cache=True, **options)


def _bytes_needed(model: Any, context: int) -> int:
    """About what a prefill allocates beyond the weights: the cache, and the largest tensors that live together."""
    config = model.config.get_text_config()

    def told(name: str) -> int:
        return int(getattr(config, name, None) or 0)

    heads = told("num_attention_heads")
    dim = told("head_dim") or (told("hidden_size") // heads if heads else 0)
    cache = 2 * told("num_hidden_layers") * (told("num_key_value_heads") or heads) * dim
    one_layer = 4 * told("hidden_size") + 3 * told("intermediate_size") + 4 * heads * dim
    return int(context * (cache + one_layer) * model.dtype.itemsize)
