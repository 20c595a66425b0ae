"""The pictures of a report. Needs matplotlib, imported on first use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..eval.spec import Spec
from ..eval.statistics import Estimate
from ..eval.summary import Variant
from ..spine.figure import frame, handle, label, plain, shares, widen
from ..spine.style import BUDGET, COLOURS, INK, QUIET, SELECTIVITY, Look, looks
from .gather import Finding, Setting, place
from .rivals import DENSE, unbudgeted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _grid_of(settings: Sequence[Setting]) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(s.task for s in settings)), sorted({s.context for s in settings})


def _panels(
    title: str,
    subtitle: str,
    settings: Sequence[Setting],
    legend: Sequence[Any],
    draw: Callable[[Axes, Setting], None],
    labels: tuple[str, str],
) -> Figure:
    """A panel for each setting: tasks down, contexts across."""
    tasks, contexts = _grid_of(settings)
    figure, grid = frame(title, subtitle, len(tasks), len(contexts), legend)
    for i, task in enumerate(tasks):
        for j, context in enumerate(contexts):
            axes = grid[i][j]
            setting = next((s for s in settings if (s.task, s.context) == (task, context)), None)
            if setting is None:
                axes.set_visible(False)
                continue
            sample = f"n {setting.questions}" if setting.findings else "nothing to compare"
            plain(axes, f"{place(setting)} ({sample})")
            if setting.findings:
                draw(axes, setting)
            label(axes, labels[0], labels[1] if j == 0 or not grid[i][0].get_visible() else "")
    return figure


def styled(variants: Iterable[Variant]) -> tuple[dict[Spec, Look], list[Any]]:
    """A look for each policy over its budgets, or over the multiples of a tuned one, and the legend, in which those
    without a budget come last. A policy that was run in one size only, without a budget, is a point.

    Of several with the same preset the one with budgets has the full colour, as in the plots that show it alone.
    """
    listed = sorted(dict.fromkeys(variants), key=unbudgeted, reverse=True)
    styles = looks(Spec.parse(policy).family for policy, _ in listed)
    sizes = Counter(Spec.parse(variant[0]).family for variant in filter(unbudgeted, listed))
    order = sorted(styles, key=lambda spec: spec in sizes)

    def shown(spec: Spec, look: Look) -> Any:
        if spec.preset == "dense":
            return handle(look, marker="", linewidth=1.2)
        return handle(look, linestyle="" if sizes[spec] == 1 else look.line)

    return styles, [shown(spec, styles[spec]) for spec in order]


def _bars(value: Estimate) -> list[list[float]]:
    return [[max(value.value - value.low, 0)], [max(value.high - value.value, 0)]]


def accuracy(model: str, settings: Sequence[Setting]) -> Figure:
    """Accuracy over what a tile really kept; a line for each policy, its budgets along it, or a point without one."""
    styles, legend = styled(f.variant for f in _findings(settings))

    def draw(axes: Axes, setting: Setting) -> None:
        for spec, look in styles.items():
            findings = [f for f in setting.findings if f.spec.family == spec and f.variant != DENSE]
            findings.sort(key=lambda f: f.blocks)
            xs = [f.blocks for f in findings]
            ys = [f.accuracy.value for f in findings]
            for x, f in zip(xs, findings, strict=True):
                axes.errorbar(x, f.accuracy.value, yerr=_bars(f.accuracy), color=look.colour, elinewidth=1, alpha=0.55)
            axes.plot(
                xs, ys, look.line, color=look.colour, marker=look.marker, markerfacecolor=look.fill,
                markersize=5.5, linewidth=1 if look.control else 1.8, zorder=3, clip_on=False,
            )  # fmt: skip
        dense = setting.find(*DENSE)
        if dense is not None:
            axes.axhline(dense.accuracy.value, color=COLOURS["dense"], linewidth=1.2, zorder=2)
            axes.axhspan(dense.accuracy.low, dense.accuracy.high, color=COLOURS["dense"], alpha=0.07, linewidth=0)
        found = [f.blocks for f in setting.findings if f.variant != DENSE]
        if found and max(found) > 6 * min(found):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        shares(axes)

    subtitle = (
        f"{_tile_budgets(_findings(settings))}; horizontally the effective budget as measured, blocks kept a tile\n"
        "bars, and dense's band: 95% intervals (Wilson's; over contexts where questions share them)"
    )
    return _panels(
        f"Accuracy over budget: {model}",
        subtitle,
        settings,
        legend,
        draw,
        ("effective budget (blocks of 64 keys a tile)", "accuracy"),
    )


def _findings(settings: Sequence[Setting]) -> list[Finding]:
    return [f for s in settings for f in s.findings]


def _tile_budgets(findings: Sequence[Finding]) -> str:
    texts = {f.line.budget: f.budget_text for f in findings if f.line.tile_budget is not None}
    listed = ", ".join(texts[b] for b in sorted(texts))
    return f"budget (tile budget): {listed}" if listed else "no budget: dense only"


def split(model: str, settings: Sequence[Setting]) -> Figure | None:
    """A router's lift over top-k in two parts."""
    from matplotlib.patches import Patch

    rows = [(s, x) for s in settings for x in s.splits]
    if not rows:
        return None
    legend = [
        Patch(color=BUDGET, label="budget: what any policy gets for as many blocks"),
        Patch(color=SELECTIVITY, label="selectivity: what choosing the tiles adds"),
        handle(Look("lift: the sum", INK, "D", False), linestyle=""),
    ]
    panel = (6.6, 0.3 + 0.62 * len(rows))
    figure, grid = frame(
        f"Where the router's lift comes from: {model}",
        "mean score of the router minus top-k's on the same scorer at the same budget; lines: 95% over contexts",
        1, 1, legend, panel=panel,
    )  # fmt: skip
    widen(figure, 2.2)  # for the names
    axes = grid[0][0]
    plain(axes, "")
    names = []
    for i, (setting, lift) in enumerate(rows):
        finding = setting.find(lift.policy, lift.budget)
        assert finding is not None  # a split is of a policy that was run
        names.append(f"{finding.label}\n{place(setting)}")
        for offset, part, colour in ((0.17, lift.parts.budget, BUDGET), (-0.17, lift.parts.selectivity, SELECTIVITY)):
            axes.barh(-i + offset, part.value, height=0.3, color=colour, zorder=2)
            _whisker(axes, part, -i + offset)
        axes.plot([lift.parts.lift.value], [-i], "D", color=INK, markersize=5, zorder=4)
    axes.axvline(0, color=INK, linewidth=1, zorder=3)
    axes.set_yticks([-i for i in range(len(rows))], names, fontsize=8.5, color=INK)
    axes.set_ylim(-len(rows) + 0.5, 0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.05), max(high, 0.05))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.2f}" if abs(x) > 1e-9 else "0")
    label(axes, "difference of accuracy")
    axes.grid(axis="y", visible=False)
    return figure


def _whisker(axes: Axes, part: Estimate, y: float) -> None:
    if not math.isnan(part.low):
        axes.plot([part.low, part.high], [y, y], color=INK, linewidth=1, zorder=3)


def hits(model: str, settings: Sequence[Setting]) -> Figure | None:
    """Hit rate of gold blocks by layer, at each setting's smallest budget, where it is hardest."""
    return _over_layers(
        f"Gold blocks kept, by layer: {model}",
        "gold blocks kept for the tile with the question: by any head of the layer (lines), by a head (dotted)",
        {id(s): (s, _smallest(s)) for s in settings if any(f.line.hit is not None for f in s.findings)},
        lines="hit_union", dotted="hit", dotted_label="mean over heads", y_label="hit rate",
    )  # fmt: skip


def triggers(model: str, settings: Sequence[Setting]) -> Figure | None:
    """How often the tile with the question is triggered, beside how often any tile is."""
    return _over_layers(
        f"Was the tile with the question triggered? {model}",
        "share triggered, by layer: the tile that holds the question (lines), all tiles that could be (dotted)",
        {id(s): (s, [f for f in _smallest(s) if f.triggers]) for s in settings if any(f.triggers for f in s.findings)},
        lines="asked_triggered", dotted="trigger_rate", dotted_label="all tiles", y_label="share",
    )  # fmt: skip


def _over_layers(
    title: str, subtitle: str, shown: dict[int, tuple[Setting, list[Finding]]], *, lines: str, dotted: str,
    dotted_label: str, y_label: str,
) -> Figure | None:  # fmt: skip
    """Two measures of each finding by layer, one as a line and one dotted, a panel for each setting (by its id)."""
    if not shown:
        return None
    styles = looks(f.spec for _, findings in shown.values() for f in findings)
    thin: dict[str, Any] = {"linestyle": ":", "linewidth": 1.1}

    def draw(axes: Axes, setting: Setting) -> None:
        for f in shown[id(setting)][1]:
            _by_layer(axes, f, lines, styles[f.spec])
            _by_layer(axes, f, dotted, styles[f.spec], marker="", **thin)
        _layers(axes, setting)
        shares(axes)

    legend = [handle(look) for look in styles.values()]
    legend.append(handle(Look(f"dotted: {dotted_label}", QUIET, "", False), **thin))
    budgets = _tile_budgets([f for _, findings in shown.values() for f in findings])
    subtitle = f"{subtitle}\neach panel at its smallest budget; {budgets}"
    return _panels(title, subtitle, [s for s, _ in shown.values()], legend, draw, ("layer", y_label))


def _smallest(setting: Setting) -> list[Finding]:
    sparse = [f for f in setting.findings if f.line.budget]
    least = min((f.line.budget for f in sparse), default=0)
    return [f for f in sparse if f.line.budget == least] or list(setting.findings)


def _by_layer(axes: Axes, finding: Finding, what: str, look: Look, **changes: Any) -> None:
    points = [(x, y) for x, y in zip(finding.layers, finding.by_layer[what], strict=True) if y is not None]
    if points:
        style: dict[str, Any] = {
            "color": look.colour, "marker": look.marker, "markerfacecolor": look.fill, "linestyle": look.line,
            "markersize": 4.5, "linewidth": 1 if look.control else 1.6, "zorder": 3, "clip_on": False,
        }  # fmt: skip
        axes.plot(*zip(*points, strict=True), **(style | changes))


def _layers(axes: Axes, setting: Setting) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    layers = setting.findings[0].layers
    axes.set_xlim(layers[0] - 0.3, layers[-1] + 0.3)


def of(model: str, settings: Sequence[Setting]) -> dict[str, Figure]:
    """Every picture there is something to show in, by kind."""
    shown = [s for s in settings if s.findings]
    if not shown:
        return {}
    made = {
        "accuracy": accuracy(model, shown),
        "split": split(model, shown),
        "hits": hits(model, shown),
        "triggers": triggers(model, shown),
    }
    return {kind: figure for kind, figure in made.items() if figure is not None}
