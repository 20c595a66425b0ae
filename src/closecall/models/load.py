"""Loads a model and its tokenizer by name: one we know, one that `closecall get` fetched, a hub id, a local path."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..registry import unknown
from . import catalogue as panel
from .cache import UnavailableError
from .convert import convert, need_gguf, need_transformers, without_bars
from .entry import Entry
from .source import Source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLES = 64  # of each weight, for the fingerprint
# What a configuration says of its file, not of the model. The weights tell their dtype themselves.
INCIDENTAL = ("_name_or_path", "_commit_hash", "architectures", "dtype", "quantization_config", "transformers_version")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to prefill: in eval mode, without gradients, on its device.

    `label` says what the weights are, `fingerprint` tells different weights, configurations and dtypes apart in
    results, `revision` is the hub's commit where there is one.
    """

    name: str
    label: str
    model: Any
    tokenizer: Any
    entry: Entry | None
    fingerprint: str
    revision: str | None = None

    @property
    def own_name(self) -> str:
        return own_name(self.name)

    @property
    def context(self) -> int | None:
        """How many tokens it was trained to read, as far as we know."""
        if self.entry is not None:
            return self.entry.trained_context
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def longer_than_trained(self, contexts: Iterable[int]) -> list[int]:
        """Those of the contexts, ascending, that it was not trained to read."""
        most = self.context
        return [n for n in sorted(contexts) if most is not None and n > most]

    def prompt(self, question: str, *, multiple_choice: bool = False) -> str:
        """The question as the model's chat template wants it, quirks included; tokenise it without special tokens.

        Without a template it is the question as it is, after the begin token if the tokenizer adds one.
        """
        entry = self.entry
        if getattr(self.tokenizer, "chat_template", None) is None:
            begins = self.tokenizer("").input_ids[:1] == [self.tokenizer.bos_token_id]
            return f"{self.tokenizer.bos_token}{question}" if begins else question
        options = dict(entry.template_options) if entry else {}
        turns = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
        return str(text) + (entry.choice_prefill if entry and multiple_choice else "")


def own_name(name: str) -> str:
    """A model's name; of a directory only its last part, which says as much and does not tell whose disk it was."""
    return Path(name).name if "/" in name and (name.startswith(("/", ".", "~")) or name.count("/") > 1) else name


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads a model we know by name, a hub id (`owner/name`), a local directory, or a GGUF file.

    `dtype` is a torch dtype or `fp32`, `bf16`, `fp16`; without one, the type the weights were saved in. Attention is
    SDPA, or eager where the model has no SDPA. A panel model gets the tokenizer options it needs; so does a local
    directory that bears the name of its repository.

    >>> load_model("smollm2").model.config.num_attention_heads  # doctest: +SKIP
    9
    """
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"load takes a model's name or a path, got {type(name).__name__}")
    name = os.fspath(name)
    wanted = dtype_of(dtype)
    place = _device(device)
    transformers = need_transformers()
    with without_bars():
        entry = panel.find(name)
        if entry is not None and entry.source is not None and name.lower() == entry.name:
            return _fetched(transformers, entry, entry.source, wanted, place)
        return _named(transformers, name, wanted, place, trust_remote_code)


load = load_model  # as `closecall.load`


def _named(
    transformers: ModuleType, name: str, wanted: torch.dtype | None, place: torch.device, trust_remote_code: bool
) -> LoadedModel:
    source, entry = _resolve(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    where: str | Path = source
    if isinstance(source, Path) and source.is_file():
        need_gguf()
        where, options = source.parent, {"gguf_file": source.name}
    extra = dict(entry.tokenizer_options) if entry else {}
    try:
        if "gguf_file" not in options:  # asked first, because it gives the clearest errors
            transformers.AutoConfig.from_pretrained(where, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options, **extra)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=wanted or "auto", **options)
    except (OSError, ValueError, ImportError) as error:
        raise UnavailableError(_why(name, error, local=isinstance(source, Path))) from error
    revision = getattr(model.config, "_commit_hash", None)
    return _ready(name, str(source), model, tokenizer, entry, place, revision)


def _ready(
    name: str, label: str, model: Any, tokenizer: Any, entry: Entry | None, place: torch.device, revision: Any
) -> LoadedModel:
    if tokenizer.pad_token is None:  # batches need one, and attention masks it anyway
        tokenizer.pad_token = tokenizer.eos_token
    model = model.to(place).eval().requires_grad_(False)
    return LoadedModel(name, label, model, tokenizer, entry, fingerprint(model), revision)


def fingerprint(model: Any, *, whole: bool = False) -> str:
    """A hash of the configuration and the weights: where they were loaded from plays no part.

    Of a sample of every weight, and short; with `whole`, of every byte, which takes seconds for a large model.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in INCIDENTAL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
        if not value.numel() or value.is_meta:  # meta: offloaded, its values are not here
            continue
        flat = value.detach().flatten()
        if whole:
            digest.update(memoryview(flat.contiguous().cpu().view(torch.uint8).numpy()))
        else:
            sample = flat[:: max(1, flat.numel() // SAMPLES)]
            digest.update(sample.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest() if whole else digest.hexdigest()[:12]


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    """The type that is meant; None for the one that the weights were saved in."""
    if given is None or isinstance(given, torch.dtype):
        return given
    if given not in DTYPES:
        raise unknown("dtype", given, DTYPES)
    return DTYPES[given]


def _device(given: torch.device | str) -> torch.device:
    try:
        place = torch.device(given)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(given)!r} cannot be used here: {reason}. Use cpu") from error
    return place


def _resolve(name: str) -> tuple[str | Path, Entry | None]:
    """What to load, a hub id or an existing path, and its panel entry."""
    entry = panel.find(name)
    if entry is not None:
        return entry.hub_id, entry
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise UnavailableError(f"{name} is a file, but a model is a directory with config.json, or a .gguf file")
        same = (e for e in panel.PANEL if e.hub_id.split("/")[1].lower() == path.resolve().name.lower())
        return path, next(same, None)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UnavailableError(f"no such directory: {path}. A local model is a directory with config.json and weights")
    if "/" not in name:
        hint = unknown("model", name, panel.names())
        raise ValueError(f"{hint}; or a hub id like owner/name, or a local directory")
    return name, None


def _why(name: str, error: Exception, *, local: bool) -> str:
    """What transformers' long complaint comes down to, and the remedy."""
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if "trust_remote_code" in text:
        return (
            f"{name} comes with code of its own, which closecall does not run by default: read that code, and if you "
            f"trust it, pass trust_remote_code=True"
        )
    if "couldn't connect" in text or "offline" in text.lower():
        return (
            f"{name} is not in the hub's local cache, and the hub cannot be reached: check the network, the name, and "
            f"HF_HUB_OFFLINE; or download it elsewhere and pass its directory"
        )
    if any(sign in text for sign in ("gated repo", "401 Client Error", "403 Client Error")):
        return f"{name} is gated or private: accept its licence on the hub, then run `hf auth login`"
    if "not a valid model identifier" in text or "404 Client Error" in text:
        return f"the hub has no model {name!r}: check the spelling, and `hf auth login` if it is private"
    if "does not recognize this architecture" in text:
        return f"this transformers does not know the architecture of {name}: pip install --upgrade transformers"
    if "Unrecognized configuration class" in text:
        return f"{name} is no causal language model, so there is nothing to prefill: choose a decoder-only model"
    if "backend tokenizer" in text:
        return f"{name} has no tokenizer that transformers can read: tokenizer.json is missing or damaged"
    remedy = ". A model directory needs config.json, weights and tokenizer files" if local else ""
    return f"{name} could not be loaded: {first.rstrip('.')}{remedy}"


def _fetched(
    transformers: ModuleType, entry: Entry, source: Source, wanted: torch.dtype | None, place: torch.device
) -> LoadedModel:
    """A model that `closecall get` has fetched."""
    directory = convert(source, say=log.info)
    own = getattr(torch, source.dtype)
    label = source.label
    if wanted not in (None, own):
        label = f"{label}, then cast to {str(wanted).removeprefix('torch.')}"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=wanted or own)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return _ready(entry.name, label, model, tokenizer, entry, place, None)
