from __future__ import annotations

import pytest

from closecall_lab.bench import over_context
from closecall_lab.spine import numbers
from closecall_lab.spine.options import counts
from closecall_lab.spine.table import Column, Table

COLUMNS = [
    Column("name", lambda r: r["name"], left=True),
    Column("share", lambda r: r["share"], ".1%"),
    Column("never", lambda r: None),
]
TABLE = Table("Title", COLUMNS, [{"name": "a", "share": 0.5}, {"name": "longer", "share": None}], ["A note."])


def test_text() -> None:
    assert TABLE.text().splitlines() == [
        "Title",
        "",
        "name    share",
        "-------------",
        "a       50.0%",
        "longer      -",
        "",
        "A note.",
    ]


def test_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "# Title",
        "",
        "| name | share |",
        "| --- | ---: |",
        "| a | 50.0% |",
        "| longer | - |",
        "",
        "- A note.",
    ]


def test_numbers_as_people_write_them() -> None:
    assert [numbers.size(n) for n in (256, 4096, 131072, 1000)] == ["256", "4K", "128K", "1000"]
    assert [numbers.three_digits(x) for x in (12345.6, 99.6, 12.34, 1.234, 0.01234)] == [
        "12346", "100", "12.3", "1.23", "0.0123",
    ]  # fmt: skip
    assert counts("--contexts", "4k, 1K,256,4096,") == (4096, 1024, 256)


ROWS = [
    {"context": n, "dtype": dtype, "dim": dim, "us": n / 256, "them": None if n == 256 else 1.5}
    for n in (256, 512, 1024)
    for dtype in ("fp32", "bf16")
    for dim in (64, 128)
    if (dtype, dim) != ("bf16", 128)
]
US, THEM = (
    over_context.Series("us", "us", "#112233", "o"),
    over_context.Series("them", None, "#445566", "", dashed=True),
)


def test_a_panel_for_every_kind_of_cell() -> None:
    figure = over_context.speedups("Title", "subtitle", ROWS, [US, THEM], ("dtype", "dim"))
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == ["fp32, D = 64", "bf16, D = 64", "fp32, D = 128"]
    ours, theirs = figure.axes[0].get_lines()[:2]
    assert ours.get_xydata().tolist() == [[256, 1], [512, 2], [1024, 4]]
    assert theirs.get_xydata().tolist() == [[512, 1.5], [1024, 1.5]]  # what was not measured is not drawn
    low, high = figure.axes[0].get_ylim()
    assert low < 1 < 4 < high


def test_lines_without_a_name_are_not_labelled() -> None:
    figure = over_context.walls("Title", "subtitle", ROWS, [US, THEM], ("dtype", "dim"))
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["4.00x  us"]
    assert [line.get_linestyle() for line in axes.get_lines()[:2]] == ["-", "--"]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 4


def test_labels_keep_their_distance() -> None:
    moved = over_context._apart([0.5, 0.1, 0.52, 0.9], 0.1)
    assert moved == [0.5, 0.1, 0.6, 0.9]
    assert over_context._apart([0.3, 0.3, 0.3], 0.1) == pytest.approx([0.3, 0.4, 0.5])
