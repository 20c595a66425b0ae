"""Fits budgets by layer and head: error curves of the fitting text, cached piece by piece, then the best split."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from closecall import Policy, attach
from closecall.hf.op import Call
from closecall.models.load import LoadedModel
from closecall.rules.base import Rule
from closecall.rules.even import Even
from closecall.rules.last_tile import LastTile
from closecall.rules.per_head import PerHead

from ..spine.files import draft
from ..spine.progress import Say
from .allocate import allocate
from .curves import Sample, curves
from .pieces import Piece

Array = npt.NDArray[Any]
FLOOR = 6 * 64  # keys that every head keeps: heads that matter only when something is asked look idle on plain text


@dataclass(frozen=True)
class Fit:
    """The error curves of a model's layers: what is needed to split any mean budget."""

    layers: tuple[int, ...]
    curves: Array  # [layers, heads, blocks + 1]

    def policy(self, base: Policy, mean: float) -> Policy:
        """`base` with the best split of a mean tile budget; where `base` protects last tiles, so does the result."""
        floor = max(FLOOR // base.block, base.most_forced + 1)
        budgets = allocate(self.curves, mean, min(floor, int(mean)))
        return _with_rule(base, PerHead(tuple(tuple(int(b) for b in row) for row in budgets), self.layers))

    def even(self, base: Policy, mean: float) -> Policy:
        """The same blocks for every head: what the split is held against."""
        return _with_rule(base, Even(mean))

    def error(self, budgets: Sequence[Sequence[int]] | int) -> float:
        """Root mean square over layers of the relative output error at these budgets, or at one for all heads."""
        last = self.curves.shape[2] - 1
        chosen = np.broadcast_to(np.asarray(budgets), self.curves.shape[:2])
        errors = np.take_along_axis(self.curves, np.minimum(chosen, last)[..., None], 2)[..., 0]
        return float(np.sqrt(errors.sum(1).mean()))


def _with_rule(base: Policy, rule: Rule) -> Policy:
    """`base` with another rule, under the protection of last tiles that it has."""
    outer = base.rule
    return base.replace(rule=dataclasses.replace(outer, rule=rule) if isinstance(outer, LastTile) else rule)


@torch.no_grad()
def fit(
    loaded: LoadedModel, pieces: Sequence[Piece], base: Policy, work: Path, *, sample: Sample | None = None, say: Say
) -> Fit:
    """The curves of all pieces, averaged. Each piece is one dense prefill; what `work` has is not run again."""
    sample = sample or Sample()
    key = json.dumps([loaded.fingerprint, json.loads(base.to_json())["scorer"], base.block, base.tile, asdict(sample)])
    found: list[dict[int, Array]] = []
    for number, piece in enumerate(pieces):
        name = hashlib.sha256(f"{key} {piece.digest}".encode()).hexdigest()[:16]
        path = work / f"curves-{name}.npz"
        if not path.exists():
            measured = _curves_of(loaded, piece, base, sample)
            with draft(path) as part, part.open("wb") as file:
                np.savez(file, **measured)  # type: ignore[arg-type]
        found.append(_stored(path))
        say(f"curves of piece {number + 1} of {len(pieces)}: {piece.name}")
    layers = tuple(sorted(found[0]))
    return Fit(layers, np.mean([[one[layer] for layer in layers] for one in found], axis=0))


def _stored(path: Path) -> dict[int, Array]:
    """Curves by layer. A file that someone damaged is named, not trusted."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            return {int(layer): stored[layer] for layer in stored.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and the same command measures that piece again"
        ) from error


def _curves_of(loaded: LoadedModel, piece: Piece, base: Policy, sample: Sample) -> dict[str, Array]:
    measured: dict[str, Array] = {}

    def see(layer: int, call: Call) -> None:
        seen = call.seen
        measured[str(layer)] = curves(seen.q, seen.k, seen.v, base, call.scale, sample, softcap=call.softcap)

    with attach(loaded.model, "dense") as handle:
        handle.tap(see)
        loaded.model(torch.tensor([piece.ids], device=loaded.model.device), logits_to_keep=1, use_cache=False)
    return measured
