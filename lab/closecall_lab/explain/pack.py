"""The page's data: one JSON object, packed, and what is left out where it would not fit.

The rule. Texts, sentences, close calls, and the facts of every tile and block are always there, and so is a coarse map
of every layer and head. Layers are then taken in the order of the mass they lost (without true masses: of how close
their cuts were): first each gets the exact map of what was kept, then, in the same order, the full maps of scores and
masses, as long as the page stays below the limit. What a layer did not get, the page says where it is missed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jinja2.utils import htmlsafe_json_dumps
from numpy.typing import NDArray

from . import codes
from .codes import Bytes, Floats
from .gather import Gathered, Run
from .look import CLOSE, Looked
from .words import is_right, remarks, sentences

LIMIT = 15_000_000  # bytes of the whole page
SPARE = 50_000  # and of these, for remarks, and for sentences that stand on the page as text too
COARSE, EXACT, FULL = 0, 1, 2  # how much of a layer is there


def _utf16(text: str, positions: list[int]) -> list[int]:
    """Positions as JavaScript counts them: characters beyond 16 bits count twice."""
    if text.isascii() or max(text) <= "\uffff":
        return positions
    wide = np.concatenate([[0], np.cumsum([ord(c) > 0xFFFF for c in text])])
    return [p + int(wide[p]) for p in positions]


def _size(value: Any) -> int:
    """Bytes of what the template's `tojson` makes of it."""
    return len(htmlsafe_json_dumps(value))


def _order(runs: list[Run], truth: bool) -> list[int]:
    """The layers' places, those first that lost most, or whose cuts were closest."""

    def loss(i: int) -> float:
        if truth:
            return -max(float(run.layers[i].lost.mean()) for run in runs)
        margins = [np.nanmean(m) for run in runs if not np.isnan(m := run.layers[i].cut_margin).all()]
        return min(map(float, margins), default=1.0)

    return sorted(range(len(runs[0].layers)), key=loss)


def _details(runs: list[Run], truth: bool, room: int) -> list[int]:
    """How much of each layer fits, all runs alike."""
    levels = [COARSE] * len(runs[0].layers)
    for level in (EXACT, FULL):
        for i in _order(runs, truth):
            wanted = sum(_size(_layer(run.layers[i], level)) - _size(_layer(run.layers[i], level - 1)) for run in runs)
            if levels[i] == level - 1 and wanted <= room:
                room -= wanted
                levels[i] = level
    return levels


def _layer(layer: Looked, level: int) -> dict[str, Any]:
    packed: dict[str, Any] = {"detail": level, "bound": [round(float(b), 6) for b in layer.bound]}
    if level >= EXACT:
        packed["kept"] = layer.kept
    if level == FULL:
        return packed | {"scores": layer.scores, "masses": layer.masses}
    return packed | {"coarse": {name: x for name, x in layer.coarse.items() if name != "kept" or level == COARSE}}


def left_out(levels: list[int], layers: list[int], pool: int, limit: int) -> str:
    """The rule as the page states it; empty where everything is there."""
    if min(levels) == FULL:
        return ""
    missing = [str(layer) for layer, level in zip(layers, levels, strict=True) if level < FULL]
    exact = [str(layer) for layer, level in zip(layers, levels, strict=True) if level < EXACT]
    text = (
        f"To stay below {limit / 1e6:g} MB the page has full maps only of the layers that lost most. Scores and masses "
        f"of layers {', '.join(missing)} are in cells of {pool} x {pool}"
    )
    if exact:
        text += f", and so is what layers {', '.join(exact)} kept"
    return text + ". For one of these in full, name it with --layers."


def _facts(run: Run) -> dict[str, str]:
    def shares(name: str) -> str:
        return codes.packed(codes.share_codes(np.stack([getattr(layer, name) for layer in run.layers])))

    def whole(arrays: list[NDArray[Any]]) -> str:
        return codes.packed(np.stack(arrays).astype("<u2"))

    facts = {name: shares(name) for name in ("margin", "cut_margin", "lost", "lost_most", "block_mass")}
    facts["counts"] = whole([layer.counts for layer in run.layers])
    facts["keepers"] = whole([layer.keepers for layer in run.layers])
    facts["triggered"] = codes.packed(np.stack([layer.triggered for layer in run.layers]).astype(np.uint8))
    return facts


def _mean(run: Run) -> dict[str, str]:
    coded: dict[str, Callable[[Floats], Bytes]] = {
        "kept": codes.linear_codes, "scores": codes.score_codes, "masses": codes.mass_codes, "lost": codes.mass_codes,
    }  # fmt: skip
    return {name: codes.packed(coded[name](values)) for name, values in run.mean.items()}


def _run(run: Run, gathered: Gathered) -> dict[str, Any]:
    calls = [
        [round(call.missed_by, 6), None if call.mass != call.mass else float(f"{call.mass:.3g}"), *call[2:]]
        for call in run.calls.listed()
    ]
    return {
        "label": run.label,
        "describe": str(run.policy),
        "sinks": run.policy.sinks,
        "dense": run.dense,
        "sentences": sentences(run, gathered),
        "right": is_right(run, gathered),
        "facts": _facts(run),
        "mean": _mean(run),
        "calls": calls,
    }


def data(gathered: Gathered, *, limit: int = LIMIT, beside: int = 0) -> dict[str, Any]:
    """All that the page needs, within `limit` bytes less those of what stands `beside` it."""
    prompt, g = gathered.prompt, gathered.geometry

    def places(positions: list[int]) -> list[int]:
        return _utf16(prompt.text, positions)

    runs = gathered.runs
    layers = [layer.layer for layer in runs[0].layers]
    page: dict[str, Any] = {
        "model": gathered.model,
        "tokens": len(prompt.ids),
        "block": g.block,
        "tile": g.tile,
        "blocks": g.n_blocks,
        "tiles": g.n_tiles,
        "visible": g.visible[0].tolist(),
        "first_own": g.first_own()[0].tolist(),
        "pool": gathered.cells.pool,
        "truth": gathered.truth,
        "floor": codes.FLOOR,
        "close": CLOSE,
        "layers": layers,
        "heads": runs[0].heads,
        "text": prompt.text,
        "block_starts": places(prompt.cut(g.block)),
        "tile_starts": places(prompt.cut(g.tile)),
        "question": None if prompt.question is None else places(list(prompt.question)),
        "answers": [places(list(span)) for span in prompt.answers],
        "expected": prompt.expected,
        "asking": list(gathered.asking),
        "answer_blocks": list(gathered.answer),
        "policies": [_run(run, gathered) for run in runs],
    }
    least = [[_layer(layer, COARSE) for layer in run.layers] for run in runs]
    room = limit - beside - _size(page) - _size(least) - SPARE
    if room < 0:
        raise ValueError(
            f"{len(layers)} layers of {len(prompt.ids)} tokens do not fit into {limit / 1e6:g} MB even coarsely: "
            "name fewer with --layers"
        )
    levels = _details(runs, gathered.truth, room)
    for made, run in zip(page["policies"], runs, strict=True):
        made["layers"] = [_layer(layer, level) for layer, level in zip(run.layers, levels, strict=True)]
    rule = left_out(levels, layers, gathered.cells.pool, limit)
    page["remarks"] = remarks(gathered) + ([rule] if rule else [])
    return page
