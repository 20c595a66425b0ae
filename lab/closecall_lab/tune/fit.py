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
from ..spine.last_row import last_row
from ..spine.progress import Say
from .allocate import allocate, costs_of
from .curves import Sample, curves, last_reads_all
from .pieces import Piece
from .questions import Prompt
from .stream import watched, weights

Array = npt.NDArray[Any]
SHARE = "share "  # in front of a layer's number, beside its curves in a file
FLOOR = 6 * 64  # keys that every head keeps where nothing was asked: heads that look things up are idle on plain text


@dataclass(frozen=True)
class Fit:
    """The error curves of a model's layers: what is needed to split any mean budget.

    Squared errors, weighed by how much of the residual stream they are (see `stream`).
    """

    layers: tuple[int, ...]
    curves: Array  # [layers, heads, blocks + 1]
    head_dim: int = 0
    floor: int = FLOOR  # keys that every head keeps, whatever its curve

    def policy(self, base: Policy, mean: float) -> Policy:
        """`base` with the best split of the blocks that `mean` for every tile and head would keep.

        Where `base` lets last tiles read everything, so does the result. They take their blocks first, and nobody pays
        for them again: a head with few blocks could not, and would not get to read everything.
        """
        visible = self._visible(base)
        wanted = float(np.minimum(mean, visible).sum())
        others, outer = visible, base.rule
        if isinstance(outer, LastTile) and last_reads_all(base):
            if outer.tiles >= len(visible):
                raise ValueError(
                    f"{outer.tiles} protected tiles are all {len(visible)} that a prompt of this length has: protect "
                    "fewer, or take a longer one"
                )
            others = visible[: -outer.tiles]
            wanted -= float(visible[-outer.tiles :].sum())
            outer = dataclasses.replace(outer, pay=False)
        costs, least = costs_of(others, self.curves.shape[2] - 1), base.most_forced + 1
        if wanted < costs[least]:
            raise ValueError(
                f"a mean tile budget of {mean:g} leaves {wanted / len(others):.3g} blocks a tile when the last ones "
                f"read everything, and {least} are the least: use a larger budget"
            )
        floor = least
        while floor < min(self.floor // base.block, len(costs) - 1) and costs[floor + 1] <= wanted:
            floor += 1
        rule = PerHead(_tuples(allocate(self.curves, wanted, floor, costs)), self.layers, self.head_dim)
        return _with_rule(base.replace(rule=outer), rule)

    def _visible(self, base: Policy) -> Array:
        """How many blocks each tile of a piece sees."""
        n_blocks = self.curves.shape[2] - 1
        ends = np.arange(base.tile, n_blocks * base.block + base.tile, base.tile)
        visible: Array = np.minimum(-(-ends // base.block), n_blocks)
        return visible

    def even(self, base: Policy, mean: float) -> Policy:
        """The same blocks for every head: what the split is held against."""
        return _with_rule(base, Even(mean))


def _tuples(budgets: Array) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(b) for b in row) for row in budgets)


def _with_rule(base: Policy, rule: Rule) -> Policy:
    """`base` with another rule, under the protection of last tiles that it has."""
    outer = base.rule
    return base.replace(rule=dataclasses.replace(outer, rule=rule) if isinstance(outer, LastTile) else rule)


@torch.no_grad()
def fit(
    loaded: LoadedModel, pieces: Sequence[Piece], base: Policy, work: Path, *, sample: Sample | None = None, say: Say
) -> Fit:
    """The curves of all pieces, averaged: text and prompts with questions count alike, however many there are of each.

    Each piece is one dense prefill; what `work` has is not run again.
    """
    sample = sample or Sample()
    found: dict[bool, list[dict[int, Array]]] = {}
    for number, piece in enumerate(pieces):
        asks = isinstance(piece, Prompt)
        path = work / f"curves-{_key(loaded, piece, base, sample)}.npz"
        if not path.exists():
            measured = _curves_of(loaded, piece, base, sample)
            with draft(path) as part, part.open("wb") as file:
                np.savez(file, **measured)  # type: ignore[arg-type]
        found.setdefault(asks, []).append(_stored(path, asks=asks))
        say(f"curves of piece {number + 1} of {len(pieces)}: {piece.name}")
    every = [one for kind in found.values() for one in kind]
    layers = tuple(sorted(every[0]))
    width = max(one[layers[0]].shape[1] for one in every)
    kinds = [_alike([[_widened(one[n], width) for n in layers] for one in kind]) for kind in found.values()]
    return Fit(layers, np.mean(kinds, axis=0), head_dim(loaded.model), 0 if True in found else FLOOR)


def _alike(curves: Sequence[Sequence[Array]]) -> Array:
    """The mean of some pieces' curves, as shares of the error that an eighth of the blocks would leave."""
    mean: Array = np.mean(curves, axis=0)
    whole = mean[..., mean.shape[2] // 8].sum()
    return mean / whole if whole else mean


def _key(loaded: LoadedModel, piece: Piece, base: Policy, sample: Sample) -> str:
    """Names all that a piece's curves depend on."""
    ranking = [json.loads(base.to_json())["scorer"], base.aggregate, base.pool, base.sinks, base.block, base.tile]
    rows = [asdict(sample), last_reads_all(base), piece.evidence if isinstance(piece, Prompt) else []]
    named = json.dumps([loaded.fingerprint, *ranking, *rows, piece.digest])
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def _widened(curve: Array, width: int) -> Array:
    """The curves of a shorter piece: more blocks than it has change nothing."""
    return np.pad(curve, ((0, 0), (0, width - curve.shape[1])), mode="edge")


def head_dim(model: Any) -> int:
    """The size of the model's heads."""
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _stored(path: Path, *, asks: bool) -> dict[int, Array]:
    """Curves by layer, weighed by what its errors do. A file that someone damaged is named, not trusted."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            shares = {int(n.removeprefix(SHARE)): float(stored[n]) for n in stored.files if n.startswith(SHARE)}
            worth = weights(shares, own=not asks)
            return {layer: stored[str(layer)] * worth[layer] for layer in shares}
    except (ValueError, TypeError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and the same command measures that piece again"
        ) from error


def _curves_of(loaded: LoadedModel, piece: Piece, base: Policy, sample: Sample) -> dict[str, Array]:
    ids, wanted = piece.ids, ()
    if isinstance(piece, Prompt):
        ids = piece.asking
        wanted = (*piece.evidence, *range(len(piece.ids), len(ids)))
    measured: dict[str, Array] = {}

    def see(layer: int, call: Call) -> None:
        q, k, v = call.seen[:3]
        measured[str(layer)] = curves(q, k, v, base, call.scale, sample, softcap=call.softcap, wanted=wanted)

    with attach(loaded.model, "dense") as handle, watched(loaded.model, handle.layers) as shares:
        handle.tap(see)
        loaded.model(
            torch.tensor([ids], device=loaded.model.device), logits_to_keep=last_row(loaded.model), use_cache=False
        )
    return measured | {SHARE + str(layer): np.array(share) for layer, share in shares.items()}
