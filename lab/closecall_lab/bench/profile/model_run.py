"""`closecall profile --model`: the whole prefill of a model, as it is, on our dense kernel, and with each policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from closecall.models.load import LoadedModel, load_model

from ...eval.subject import Subject
from ...spine.inputs import SEED
from ...spine.numbers import dtype_name, size
from ...spine.results import Facts, Measured
from ...spine.table import Table
from ..base import check_memory
from ..validate.device import Device
from . import figures, tables
from .prefills import Prefills, Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load(name: str, dtype: str | None, device: Device) -> LoadedModel:
    """The model to profile, on the device: a probe, or whatever `load_model` takes."""
    if name.split(":")[0] != "probe":
        return load_model(name, dtype=dtype, device=device.place)
    loaded = Subject.open(name, dtype=dtype).loaded
    loaded.model.to(device.place)
    return loaded


@dataclass(frozen=True, kw_only=True)
class ModelProfile(Profile):
    loaded: LoadedModel

    def __post_init__(self) -> None:
        for context in self.contexts:
            needed = _bytes_needed(self.loaded.model, context)
            what = f"{self.loaded.name} at {context} tokens"
            check_memory(what, needed, self.device, "use a shorter context, or bf16")

    @property
    def warnings(self) -> list[str]:
        longer = self.loaded.longer_than_trained(self.contexts)
        if not longer:
            return super().warnings
        most, listed = self.loaded.context, ", ".join(map(size, longer))
        past = f"{self.loaded.name} was trained on {most} tokens: at {listed} times are times, but answers are none."
        return [past, *super().warnings]

    def cells(self) -> list[Facts]:
        loaded = self.loaded
        shared = self.shared() | {
            "what": "model",
            "model": loaded.name,
            "label": loaded.label,
            "fingerprint": loaded.fingerprint,
            "dtype": dtype_name(loaded.model.dtype),
            "unattached": loaded.model.config._attn_implementation,
        }
        return [{"context": n, "threads": t, **shared} for n in sorted(self.contexts) for t in self.threads]

    def guess(self, cell: Facts) -> float:
        config = self.loaded.model.config.get_text_config()
        attention = 2 * getattr(config, "hidden_size", 0) * getattr(config, "num_hidden_layers", 0) * cell["context"]
        once: float = 2 * (self.loaded.model.num_parameters() + attention) * cell["context"] / (80e9 * cell["threads"])
        return self.rounds * once * (1 + len(self.policies))

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        model = self.loaded.model
        call = _prefill(model, cell["context"])
        prefills = Prefills(self.device)
        prefills.add(model, call)
        for profiled in self.policies:
            prefills.add_attached(model, call, profiled)
        return prefills.measure(self.rounds, ["The whole prefill, in one piece: nothing is multiplied."])

    def table(self, machine: Facts, measured: Measured) -> Table:
        return tables.walls(machine, measured, self.warnings)

    def figures(self, machine: Facts, measured: Measured) -> dict[str, Figure]:
        return figures.both(self.name, machine, measured)


def _prefill(model: Any, context: int) -> Callable[[], object]:
    """One call as `generate` makes it for a prompt: with a cache, and logits of the last token only."""
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, context), generator=generator).to(model.device)
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return lambda: model(ids, use_cache=True, **options)


def _bytes_needed(model: Any, context: int) -> int:
    """About what a prefill allocates beyond the weights: the cache, and the largest tensors that live together."""
    config = model.config.get_text_config()

    def number(name: str) -> int:
        return int(getattr(config, name, None) or 0)

    heads = number("num_attention_heads")
    dim = number("head_dim") or (number("hidden_size") // heads if heads else 0)
    cache = 2 * number("num_hidden_layers") * (number("num_key_value_heads") or heads) * dim
    one_layer = 4 * number("hidden_size") + 3 * number("intermediate_size") + 4 * heads * dim
    return int(context * (cache + one_layer) * model.dtype.itemsize)
