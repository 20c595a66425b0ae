"""Converts a fetched GGUF file, once, to a model that transformers loads in seconds: safetensors and a tokenizer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .cache import UnavailableError, locked
from .fetch import Say, cannot_write, fetched, need_room, terminal
from .source import Source, sized

EXTRA = "pip install 'closecall[hf]'"
NOTE = "source.json"  # says which GGUF file a conversion was made from


def need_transformers() -> ModuleType:
    """Imports transformers, only now: it takes seconds, and closecall works on tensors without it."""
    if importlib.util.find_spec("transformers") is None:
        raise UnavailableError(f"loading a model needs transformers, which is not installed: {EXTRA}")
    return importlib.import_module("transformers")


def need_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UnavailableError(f"reading a GGUF file needs the gguf package, which is not installed: {EXTRA}")


@contextmanager
def without_bars() -> Iterator[None]:
    """Loads without transformers' bar over a model's weights; the hub's bars, over long downloads, stay."""
    transformers = need_transformers()
    hub: Any = importlib.import_module("huggingface_hub.utils")
    bars: Any = transformers.utils.logging
    shown, downloads = bars.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    bars.disable_progress_bar()
    if downloads:
        hub.enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
        if not downloads:
            hub.disable_progress_bars()


def is_converted(source: Source) -> bool:
    """Tells whether the conversion is there, was made from the file we check, and has all its files in full.

    The note is written last, before the directory gets its name, so half a conversion never has one.
    """
    try:
        note = json.loads((source.converted_path / NOTE).read_text())
        return bool(note["sha256"] == source.sha256 and note["files"] == _sizes(source.converted_path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sizes(directory: Path) -> dict[str, int]:
    """The size in bytes of every file but the note."""
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != NOTE}


def convert(source: Source, *, say: Say) -> Path:
    """Returns the directory of the converted model, converting the fetched GGUF file if that was not done yet."""
    directory = source.converted_path
    if is_converted(source):  # whoever only reads needs no lock, nor a cache that can be written
        return directory
    with locked(source.home, waiting=lambda: say("another run is at it: waiting for it to finish ...")):
        if is_converted(source):
            return directory
        transformers = need_transformers()
        need_gguf()
        if not source.gguf_path.is_file():
            size = sized(source.download_size)
            raise UnavailableError(
                f"{source.name} is not fetched yet: run `closecall get {source.name}` ({size}, once)"
            )
        if not fetched(source):
            raise UnavailableError(
                f"the fetched {source.name} is damaged (wrong sha256): run `closecall get {source.name}` again"
            )
        need_room(source.home, source.converted_size)
        say(f"dequantising {source.gguf} to {source.dtype}, {sized(source.converted_size)}, once ...")
        unfinished = directory.with_name(f"{directory.name}.part")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            with contextlib.nullcontext() if terminal() else without_bars():
                _write(transformers, source, unfinished)
            facts = {"label": source.label, "sha256": source.sha256, "files": _sizes(unfinished)}
            note = json.dumps(facts, indent=1)
            (unfinished / NOTE).write_text(f"{note}\n")
            _sync(unfinished)
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(unfinished, directory)
        except OSError as error:
            raise cannot_write(directory, error) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _write(transformers: ModuleType, source: Source, directory: Path) -> None:
    """Saves the weights as those of a model that knows nothing of GGUF: the one transformers returns cannot be saved.

    The clean model is an empty shell that takes the weights without a copy, so memory holds them once.
    """
    dtype = getattr(torch, source.dtype)
    where = source.gguf_path
    quantised = transformers.GgufConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        where.parent, gguf_file=where.name, dtype=dtype, quantization_config=quantised
    )
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        clean = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    clean.generation_config = loaded.generation_config
    clean.save_pretrained(directory, state_dict=loaded.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(where.parent, gguf_file=where.name)
    if source.adds_bos:
        put_bos_in_front(tokenizer)
    tokenizer.save_pretrained(directory)


def put_bos_in_front(tokenizer: Any) -> None:
    """Makes the tokenizer begin every text with its begin token; `add_special_tokens=False` leaves it out."""
    processors = importlib.import_module("tokenizers.processors")
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def _sync(directory: Path) -> None:
    """Has the system write the files out, so that a crash after the renaming leaves no empty ones under the name."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
