"""The plain sentences at the top of the page, and the remarks below them."""

from __future__ import annotations

import numpy as np

from .gather import Gathered, Run
from .look import CLOSE

KNOWN = 0.995  # a bound above this says nothing


def percent(share: float) -> str:
    """As many digits as help: 12%, 3.1%, 0.04%."""
    if share != share:
        return "unknown"
    value = 100 * share
    if value == 0 or value >= 9.95:
        return f"{value:.0f}%"
    if value < 0.01:
        return "less than 0.01%"
    return f"{value:.1f}%" if value >= 0.995 else f"{value:.2g}%"


def _list(numbers: tuple[int, ...] | list[int], most: int = 6) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return f"{shown} and {len(numbers) - most} more" if len(numbers) > most else shown


def _plural(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def kept_share(run: Run, gathered: Gathered) -> float:
    """Kept blocks over visible ones, of all tiles, heads and layers."""
    visible = int(gathered.geometry.visible.sum()) * run.heads * len(run.layers)
    return float(sum(int(layer.counts.sum()) for layer in run.layers) / visible)


def sentences(run: Run, gathered: Gathered) -> list[str]:
    """What a policy did to the prompt, most important first."""
    lines = [run.dense] if run.dense else _about_the_cut(run, gathered)
    lines += _about_the_answer(run, gathered)
    if run.output:
        cut = f" and was stopped after {_plural(run.stopped, 'token')}" if run.stopped else ""
        lines.append(f"The model then wrote: “{run.output}”{cut}{_verdict(run, gathered)}")
    return lines


def _verdict(run: Run, gathered: Gathered) -> str:
    right = is_right(run, gathered)
    return "" if right is None else ", as expected." if right else f", but “{gathered.prompt.expected}” was expected."


def is_right(run: Run, gathered: Gathered) -> bool | None:
    """Whether the expected answer is in what the model wrote; None where nobody said what to expect."""
    expected = gathered.prompt.expected
    return expected.casefold() in run.output.casefold() if expected and run.output else None


def _about_the_cut(run: Run, gathered: Gathered) -> list[str]:
    counts = np.stack([layer.counts for layer in run.layers])
    lines = [
        f"{run.label} kept {percent(kept_share(run, gathered))} of the blocks: "
        f"{counts.mean():.1f} of {float(gathered.geometry.visible.double().mean()):.1f} that a tile sees, on average."
    ]
    if gathered.truth:
        last = np.stack([layer.lost[:, -1] for layer in run.layers])
        at, head = np.unravel_index(int(last.argmax()), last.shape)
        everywhere = float(np.stack([layer.lost for layer in run.layers]).mean())
        in_last = (
            f"The last tile lost {percent(float(last.mean()))} of its attention mass on average, and at most "
            f"{percent(float(last.max()))} (layer {run.layers[int(at)].layer}, head {head})"
        )
        whole = "The last tile lost none of its attention mass"
        lines.append(f"{in_last if last.max() > 0 else whole}; all tiles together lost {percent(everywhere)}.")
    else:
        bound = np.stack([layer.bound for layer in run.layers])
        proven = (
            "What can be proven without them: rows of the last tile lost at most "
            f"{percent(float(bound.min()))} in the best head and {percent(float(np.median(bound)))} in the median one."
        )
        nothing = "Without them nothing can be proven here about what the last tile lost."
        lines.append(f"True masses were left out. {proven if bound.min() < KNOWN else nothing}")
    close = f"{_plural(run.calls.count, 'close call')} (dropped within {CLOSE:g} of the cut)"
    if gathered.answer:
        lines.append(f"{close}; {run.calls.on_answer:,} of them touched the answer.")
    else:
        lines.append(f"{close} in the whole prompt.")
    return lines


def _about_the_answer(run: Run, gathered: Gathered) -> list[str]:
    if not gathered.answer:
        return []
    blocks = ("block " if len(gathered.answer) == 1 else "blocks ") + _list(gathered.answer)
    asked = np.stack([layer.asked for layer in run.layers])  # layer, tile, block, head
    per_layer = asked.any((1, 2))  # [L, H]: does any asking tile of this head read any answer block?
    kept, of = int(per_layer.sum()), per_layer.size
    tiles = ("tile " if len(gathered.asking) == 1 else "tiles ") + _list(gathered.asking)
    return [f"The answer stands in {blocks}; where it is asked for ({tiles}), {kept:,} of {of:,} heads kept it."]


def remarks(gathered: Gathered) -> list[str]:
    """What the reader should know about the prompt itself."""
    lines = list(gathered.prompt.remarks)
    last = gathered.geometry.n_tiles - 1
    if gathered.prompt.question is not None:
        tiles = gathered.prompt.blocks_of(gathered.prompt.question, gathered.geometry.tile)
        if last not in tiles:
            where = f"tile {tiles[0]}" if len(tiles) == 1 else f"tiles {tiles[0]} to {tiles[-1]}"
            lines.append(
                f"The question is not in the prompt's last tile ({last}) but in {where}: both count as asking."
            )
    return lines
