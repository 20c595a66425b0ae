"""The ring in one picture: what every policy answers, task by task, over all models. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...spine.figure import LEFT, frame, plain, row, widen
from ...spine.style import INK, looks
from ..spec import Spec
from .ring import Tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Selectors at equal measured budget"
SUBTITLE = (
    "Dots are questions answered over {models}, lines their 95% intervals; at the right, blocks read a tile. "
    "Who reads fewer stands higher."
)
ROW = 0.23  # inches
LETTER = 0.068  # inches of a row's name for each letter


def picture(tallies: Sequence[Tally], models: int) -> Figure:
    """Draws contexts down and tasks across, with a row for each policy, those that read least on top."""
    contexts = list(dict.fromkeys(t.context for t in tallies))
    tasks = list(dict.fromkeys(task for t in tallies for task in t.accuracy))
    listed = {c: sorted((t for t in tallies if t.context == c), key=lambda t: t.effective_budget) for c in contexts}
    most = max(len(rows) for rows in listed.values())
    subtitle = SUBTITLE.format(models="one model" if models == 1 else f"{models} models")
    figure, grid = frame(TITLE, subtitle, len(contexts), len(tasks), panel=(2.6, ROW * (most + 0.6)))
    widen(figure, LETTER * max(len(_name(t)) for t in tallies) - LEFT + 0.3)
    styles = looks(Spec.parse(t.policy) for t in tallies)
    for i, context in enumerate(contexts):
        here = list(listed[context][0].accuracy)
        for j, task in enumerate(tasks):
            axes = grid[i][j]
            if task not in here:
                axes.set_visible(False)
                continue
            place = task.partition(":")[0] + (f", {context} tokens" if context else "")
            plain(axes, f"{place}\n{listed[context][0].accuracy[task].n} questions")
            for y, tally in enumerate(listed[context]):
                row(axes, tally.accuracy[task], -y, styles[Spec.parse(tally.policy)], tally.effective_budget)
            axes.set_ylim(0.6 - most, 0.6)
            names = [_name(t) if task == here[0] else "" for t in listed[context]]
            axes.set_yticks([-y for y in range(len(names))], names, fontsize=8.5, color=INK)
            axes.set_xlim(-0.03, 1.03)
            axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    return figure


def _name(tally: Tally) -> str:
    return f"{tally.policy}, budget {tally.budget}" if tally.budget else tally.policy
