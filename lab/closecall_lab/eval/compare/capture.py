"""Queries, keys and values of real prompts, on disk, layer by layer: what selectors are judged on apart from the model.

A capture is a directory: `manifest.json` says which model it is of, and every prompt has a directory with one
safetensors file for each layer and, written last, `prompt.json`. A prompt without one is not finished, and is captured
again. Layers are written as the model reaches them, so that memory holds one at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from closecall.hf.attach import attach
from closecall.hf.op import Call
from closecall.info import DTYPES
from closecall.registry import unknown

from ... import tasks
from ...spine import files
from ...spine.last_row import last_row
from ...spine.numbers import TYPES
from ...spine.progress import Say, say
from ...tasks.example import Encoded, Example, Question, answer_tokens, encode_example, tokens_of
from ..subject import Subject

FORMAT = 1
RESERVE = 2**28  # bytes of the disk that are left alone
MOST_BYTES = 20 * 2**30


class CaptureError(OSError):
    """Raised if a layer cannot be written: says why, and that finished prompts are safe."""


@dataclass(frozen=True)
class Asked:
    """The row that answers a question, and the tokens `[start, stop)` of each span that the answer depends on."""

    row: int
    gold: tuple[tuple[int, int], ...]

    def blocks(self, block: int) -> list[int]:
        """The key blocks with a gold token, each once for every span."""
        return [b for start, stop in self.gold for b in range(start // block, (stop - 1) // block + 1)]


@dataclass(frozen=True, eq=False)
class CapturedLayer:
    """One layer's `q [1, H, N, D]`, `k, v [1, Hkv, N, D]` in float32, whatever they were saved in."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float


@dataclass(frozen=True)
class Prompt:
    """A captured prompt: an example of a task, by its number, and its layers' files."""

    directory: Path
    task: str
    context: int
    seed: int
    number: int
    example: str  # its digest
    tokens: int
    asked: tuple[Asked, ...]
    layers: tuple[int, ...]

    def load(self, layer: int) -> CapturedLayer:
        from safetensors import safe_open

        path = self.directory / _layer_name(layer)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
                q, k, v = (file.get_tensor(name)[None].float() for name in "qkv")
        except Exception as error:
            raise CaptureError(
                f"{path} cannot be read ({error}): remove {self.directory} and capture it again"
            ) from error
        return CapturedLayer(q, k, v, float(about["scale"]), float(about["softcap"]))


@dataclass(frozen=True)
class Capture:
    """An opened capture."""

    directory: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, directory: str | Path) -> Capture:
        path = Path(directory) / "manifest.json"
        if not path.exists():
            raise ValueError(f"no capture in {directory}: `closecall compare capture --out {directory} ...` makes one")
        manifest = json.loads(path.read_text())
        version = manifest.get("closecall_capture") if isinstance(manifest, dict) else None
        if version != FORMAT:
            raise ValueError(f"{path} is not a capture of format {FORMAT}: closecall_capture is {version!r}")
        return cls(Path(directory), manifest)

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    def prompts(self) -> list[Prompt]:
        """Lists the finished prompts, by task, context, seed and number."""
        found = [_read_prompt(path.parent) for path in self.directory.glob("*/prompt.json")]
        return sorted(found, key=lambda p: (p.task, p.context, p.seed, p.number))


def _layer_name(layer: int) -> str:
    return f"layer{layer:03d}.safetensors"


def _read_prompt(directory: Path) -> Prompt:
    given = json.loads((directory / "prompt.json").read_text())
    asked = tuple(Asked(a["row"], tuple((start, stop) for start, stop in a["gold"])) for a in given.pop("asked"))
    return Prompt(directory=directory, asked=asked, layers=tuple(given.pop("layers")), **given)


@dataclass(frozen=True)
class _Wanted:
    """A prompt to capture."""

    directory: Path
    task: str
    seed: int
    number: int
    example: Example
    ids: list[int]
    asked: tuple[Asked, ...]


def capture(
    subject: Subject,
    directory: str | Path,
    *,
    task_names: Sequence[str],
    contexts: Sequence[int],
    n: int,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    save_as: str | None = None,
    most_bytes: int = MOST_BYTES,
    say: Say = say,
) -> int:
    """Captures the first n examples of each task and context, and returns how many were not there yet.

    layers: indices of full-attention layers (all). save_as: `fp32`, `bf16` or `fp16` (the model's own type). Nothing is
    written if what is missing would take more than `most_bytes` or than the disk has.
    """
    if save_as is not None and save_as not in TYPES:
        raise unknown("--save-as", save_as, TYPES)
    for name, value, least in (("n", n, 1), ("seed", seed, 0), ("most_bytes", most_bytes, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    root = Path(directory)
    wanted = list(_wanted(subject, root, task_names, contexts, n, seed))
    per_token = _bytes_per_token(subject, layers, None if save_as is None else DTYPES[save_as])
    manifest = {
        "closecall_capture": FORMAT,
        "fingerprint": subject.fingerprint,
        "model": subject.loaded.name,
        **subject.facts,
        "layers": sorted(per_token),
        "saved_as": save_as or str(subject.loaded.model.dtype).removeprefix("torch."),
    }
    if (root / "manifest.json").exists():
        _check_same(root, Capture.open(root).manifest, manifest)
    missing = [w for w in wanted if not (w.directory / "prompt.json").exists()]
    _check_room(root, sum(len(w.ids) for w in missing) * sum(per_token.values()), most_bytes)
    files.write(root / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    for i, one in enumerate(missing):
        _capture_one(subject, one, sorted(per_token), save_as)
        say(f"captured {one.directory.name} ({i + 1}/{len(missing)}, {len(one.ids)} tokens)")
    return len(missing)


def _wanted(
    subject: Subject, root: Path, task_names: Sequence[str], contexts: Sequence[int], n: int, seed: int
) -> Iterator[_Wanted]:
    loaded = subject.loaded
    for task in [tasks.get(name) for name in task_names]:
        for context in contexts:
            made = task.examples(loaded.tokenizer, context, n, seed, wrap=loaded.prompt)
            for number, example in enumerate(made):
                encoded = encode_example(loaded.tokenizer, example)
                here = () if example.shared else example.questions  # those come behind what is captured
                asked = tuple(_asked(example, question, encoded) for question in here)
                name = f"{_slug(str(task))}-{context}-seed{seed}-{number:04d}-{example.digest()[:8]}"
                yield _Wanted(root / name, str(task), seed, number, example, encoded.ids, asked)


def _slug(task: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")[:60]


def _asked(example: Example, question: Question, encoded: Encoded) -> Asked:
    end = len(encoded.ids) if question.at is None else answer_tokens(example, question, encoded.offsets).start
    spans = (tokens_of(span, encoded.offsets) for span in question.gold)
    return Asked(end - 1, tuple((s.start, s.stop) for s in spans))


def _prefill(subject: Subject, ids: list[int], see: Callable[[int, Call], None]) -> None:
    model = subject.loaded.model
    with torch.no_grad(), attach(model, "dense") as handle:
        handle.tap(see)
        model(torch.tensor([ids], device=model.device), logits_to_keep=last_row(model), use_cache=False)


def _bytes_per_token(subject: Subject, layers: Sequence[int] | None, dtype: torch.dtype | None) -> dict[int, int]:
    """Returns the bytes that a token takes in every layer to capture, measured on two tokens."""
    by_layer: dict[int, int] = {}

    def see(layer: int, call: Call) -> None:
        q, k, v = call.seen[:3]
        by_layer[layer] = sum(x.shape[1] * x.shape[3] * (dtype or x.dtype).itemsize for x in (q, k, v))

    _prefill(subject, [0, 0], see)
    if layers is None:
        return by_layer
    if not layers:
        raise ValueError(f"layers is empty: full-attention layers are {sorted(by_layer)}")
    for layer in layers:
        if layer not in by_layer:
            raise ValueError(f"layers: layer {layer} is not there; full-attention layers are {sorted(by_layer)}")
    return {layer: by_layer[layer] for layer in layers}


def _check_same(root: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    for key in ("fingerprint", "layers", "saved_as"):
        if there[key] != asked[key]:
            raise ValueError(
                f"{root} holds a capture with {key} {there[key]!r}, not {asked[key]!r}: choose another directory"
            )


def _check_room(root: Path, needed: int, most_bytes: int) -> None:
    if needed > most_bytes:
        raise ValueError(
            f"this would write {needed / 2**30:.2f} GiB, more than the {most_bytes / 2**30:.2f} GiB allowed: take "
            "fewer examples, layers or tokens, --save-as bf16, or raise --max-gb"
        )
    there = root
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free - RESERVE
    if needed > free:
        raise CaptureError(
            f"this would write {needed / 2**30:.2f} GiB, and the disk of {root} has room for "
            f"{max(free, 0) / 2**30:.2f}: make room, or take fewer examples, layers or tokens, or --save-as bf16"
        )


def _capture_one(subject: Subject, one: _Wanted, layers: list[int], save_as: str | None) -> None:
    one.directory.mkdir(exist_ok=True)
    for old in one.directory.iterdir():  # of a run that was stopped
        old.unlink()
    seen: list[int] = []

    def see(layer: int, call: Call) -> None:
        if layer not in layers:
            return
        q, k, v = call.seen[:3]
        if layer in seen or q.shape[0] != 1 or q.shape[2] != len(one.ids):
            raise ValueError(f"layer {layer} did not see the whole prompt in one call: it cannot be captured")
        save_layer(one.directory / _layer_name(layer), (q, k, v), call.scale, call.softcap, save_as)
        seen.append(layer)

    _prefill(subject, one.ids, see)
    example = one.example
    about: dict[str, Any] = {"task": one.task, "context": example.context, "seed": one.seed, "number": one.number}
    about |= {"example": example.digest(), "tokens": len(one.ids), "layers": sorted(seen)}
    about["asked"] = [{"row": a.row, "gold": [list(span) for span in a.gold]} for a in one.asked]
    files.write(one.directory / "prompt.json", json.dumps(about, indent=1) + "\n")


def save_layer(
    path: Path, qkv: tuple[Tensor, Tensor, Tensor], scale: float, softcap: float, save_as: str | None = None
) -> None:
    """Writes one layer's file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    dtype = None if save_as is None else DTYPES[save_as]
    tensors = {
        name: x[0].detach().to(device="cpu", dtype=dtype or x.dtype).contiguous()
        for name, x in zip("qkv", qkv, strict=True)
    }
    try:
        with files.draft(path) as part:
            save_file(tensors, part, {"scale": repr(scale), "softcap": repr(softcap)})
    except (OSError, SafetensorError) as error:
        raise CaptureError(
            f"{path} cannot be written ({error}): finished prompts are safe, and the same command goes on from there"
        ) from error
