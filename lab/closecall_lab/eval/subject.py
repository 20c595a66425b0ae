"""The model under evaluation, and whether this machine has room for what it is to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from closecall.models.convert import without_bars
from closecall.models.load import LoadedModel, dtype_of, fingerprint, load_model
from closecall.registry import unknown

from ..spine import memory

if TYPE_CHECKING:
    import torch

GIB = 2**30


@dataclass(frozen=True)
class Subject:
    """A model under evaluation. `fingerprint` is a hash of its configuration and of every byte of its weights."""

    loaded: LoadedModel
    fingerprint: str

    @classmethod
    def open(cls, name: str, *, dtype: str | None = None) -> Subject:
        """Opens a probe (`probe`, `probe:qwen3`, `probe:qwen3:2` for its seed 2) or whatever `load_model` takes."""
        loaded = _probe(name, dtype_of(dtype)) if name.split(":")[0] == "probe" else load_model(name, dtype=dtype)
        return cls(loaded, fingerprint(loaded.model, whole=True))

    def key_value_bytes(self, tokens: int) -> int:
        """What the keys and values of so many tokens take in all layers."""
        config = self.loaded.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * width * tokens * self.loaded.model.dtype.itemsize)

    def check_room(self, tokens: int) -> None:
        """Refuses a context whose keys and values do not fit into the free memory, before any of it is read."""
        # A question continues a copy of the context's keys and values, layer by layer: they are there twice.
        need, free = 2 * self.key_value_bytes(tokens), memory.free()
        if self.loaded.model.device.type == "cpu" and free is not None and need > free:
            raise ValueError(
                f"{tokens} tokens need {need / GIB:.2g} GiB for keys and values on {self.loaded.own_name}, and "
                f"{free / GIB:.2g} GiB are free: use a shorter context, fewer --jobs, or --dtype bf16"
            )

    @property
    def facts(self) -> dict[str, Any]:
        return {"label": self.loaded.label, "context": self.loaded.context, "dtype": str(self.loaded.model.dtype)}


def _probe(name: str, dtype: torch.dtype | None) -> LoadedModel:
    from .. import probes

    _, kind, seed = ([*name.split(":"), "", ""])[:3]
    kind, seed = kind or "qwen2", seed or "0"
    if name.count(":") > 2 or not seed.isdigit():
        raise ValueError(f"a probe is written probe:NAME or probe:NAME:SEED, got {name!r}")
    if kind not in probes.names():
        raise unknown("probe", kind, probes.names())
    with without_bars():
        model, tokenizer = probes.load(kind, seed=int(seed))
    label = f"closecall's {kind}-shaped probe, seed {seed}"
    ready: Any = model
    ready = ready if dtype is None else ready.to(dtype)
    return LoadedModel(name, label, ready.eval().requires_grad_(False), tokenizer, None, fingerprint(model))
