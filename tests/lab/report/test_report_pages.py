"""Text, Markdown, HTML and pictures say what was gathered, and need nothing from outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import add

from closecall.cli import Parser
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store
from closecall_lab.report import cli, compose, figures, tables
from closecall_lab.report.gather import Gathered, gather
from closecall_lab.spine.page import Page
from closecall_lab.spine.style import COLOURS, looks

NUMBERS = {
    "router": ("20.2", "0.57 [0.42, 0.71]", "0.64 [0.48, 0.78]", "36"),
    "topk": ("15.5", "0.45 [0.31, 0.60]", "0.50 [0.34, 0.66]"),
    "dense": ("64.5", "0.90 [0.77, 0.96]", "1.00 [0.90, 1.00]"),
}


@pytest.fixture(scope="module")
def page(gathered: Gathered) -> Page:
    return compose.page(gathered)


def lines_of(text: str, policy: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(rf"\|? ?{re.escape(policy)} +[|a-z-]", line)]


@pytest.mark.parametrize("policy", NUMBERS)
def test_the_table_has_the_numbers(page: Page, policy: str) -> None:
    line = lines_of(page.markdown(), policy)[0]
    assert all(number in line for number in NUMBERS[policy]), line
    parts = " ".join(lines_of(page.text(), policy))
    assert all(number in parts for number in NUMBERS[policy]), parts
    html = page.html()
    for number in NUMBERS[policy]:
        assert f">{number}</td>" in html


def test_p_values_and_the_split_are_printed(page: Page) -> None:
    assert "0.625 (" in lines_of(page.markdown(), "router")[0]  # 3 vs 1, against the matched control
    assert "+0.12 [" in page.text() or "+0.13 [" in page.text()  # 23/40 - 18/40 = 0.125
    assert "Warning: 8192 tokens are more than the 4096 that tiny was trained for" in page.markdown()


def test_a_budget_never_stands_without_its_tile_budget(page: Page) -> None:
    for text in (page.text(), page.markdown(), page.html()):
        assert "budget (tile budget)" in text
        assert "8 (16 a tile)" in text


class Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert tag not in ("script", "link", "iframe", "object")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_whole_and_needs_nothing(page: Page) -> None:
    html = page.html()
    parser = Resources()
    parser.feed(html)
    assert parser.open == []
    assert sum(r.startswith("data:image/svg+xml;base64,") for r in parser.found) == len(page.figures) == 5
    assert all(r.startswith(("data:", "#")) for r in parser.found)
    assert "url(" not in html
    assert "@import" not in html
    anchors = set(re.findall(r'id="(\w+)"', html))
    assert {r[1:] for r in parser.found if r.startswith("#")} <= anchors


def test_pictures_stand_in_two_columns_and_broad_ones_across_both(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        for context in (2048, 4096, 8192):
            add(store, "1100", policy="dense", context=context)
            add(store, "1000", policy="topk", budget=8, context=context)
        wide = compose.page(gather(store)).html()
        add(store, "11", policy="dense", model="b" * 64)
        store.add_model("b" * 64, "other", {})
        narrow = compose.page(gather(store, models=["other"])).html()
    assert wide.count('<figure class="broad">') == len(re.findall("<figure", wide)) == 2  # three contexts side by side
    assert narrow.count('<figure class="broad">') == 0
    assert len(re.findall("<figure", narrow)) > 0
    assert wide.count('<div class="figures">') == 1
    assert "grid-template-columns: 1fr 1fr" in wide


def test_html_escapes(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "<b>&", {"label": '"x" <i>'})
        add(store, "1", policy="dense", warnings=["a < b"])
        html = compose.page(gather(store)).html()
    assert "<b>&" not in html
    assert "&lt;b&gt;&amp;" in html
    assert "a &lt; b" in html


def test_files(page: Page, tmp_path: Path) -> None:
    written = page.write(tmp_path, "report")
    names = {p.name for p in written}
    kinds = ("router", "accuracy", "hits", "split", "triggers")
    assert names == {"report.md", "report.html"} | {f"{k}-tiny.{s}" for k in kinds for s in ("png", "svg")}
    before = {p: p.read_bytes() for p in written}
    assert all(before[p].startswith(b"\x89PNG") for p in written if p.suffix == ".png")
    linked = re.findall(r"\]\(([^)]+)\)", (tmp_path / "report.md").read_text())
    assert len(linked) == 5
    assert all((tmp_path / name).is_file() for name in linked)
    page.write(tmp_path, "report")
    assert {p: p.read_bytes() for p in written} == before


def test_curves_are_drawn_where_the_findings_are(gathered: Gathered) -> None:
    drawn = figures.accuracy("tiny", gathered.settings)
    (axes,) = drawn.axes
    points = {
        (round(float(x), 6), round(float(y), 6))
        for line in axes.lines
        if line.get_marker() not in ("", "None", None)
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    wanted = {
        (f.line.effective_budget, round(f.accuracy.value, 6)) for f in gathered.settings[0].findings if f.line.budget
    }
    assert points == wanted
    assert [t.get_text() for t in drawn.texts[:1]] == ["Accuracy over budget: tiny"]


def test_a_policy_without_a_budget_is_a_point(tmp_path: Path) -> None:
    """Its blocks are of 32 keys: 30 of them are as much as 15 of the others'."""
    with Store(tmp_path / "s.db") as store:
        store.add_model("a" * 64, "tiny", {})
        add(store, "1111", policy="dense", effective=64.5)
        add(store, "1110", policy="tuned:smollm2", effective=30.0)
        add(store, "1100", policy="auto", budget=8, effective=15.5)
        drawn = figures.accuracy("tiny", gather(store).settings)
    (axes,) = drawn.axes
    points = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() not in ("", "None", None)]
    assert sorted(filter(None, points)) == [[[15.0, 0.75]], [[15.5, 0.5]]]
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["dense", "auto", "tuned:smollm2"]
    assert [line.get_linestyle() for line in legend.legend_handles] == ["-", "-", "None"]  # type: ignore[union-attr]
    colours = [line.get_color() for line in legend.legend_handles]  # type: ignore[union-attr]
    assert colours[1] == COLOURS["auto"]  # as where it is drawn alone
    assert colours[2] == COLOURS["tuned"]


def test_a_policy_has_one_colour_everywhere(gathered: Gathered) -> None:
    made = [figures.accuracy("tiny", gathered.settings), figures.hits("tiny", gathered.settings)]
    for figure in made:
        assert figure is not None
        (legend,) = figure.legends
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
            preset = text.get_text().partition("/")[0]
            if preset in COLOURS:
                assert handle.get_color() == COLOURS[preset]  # type: ignore[union-attr]


def test_looks_tell_overrides_apart() -> None:
    specs = [Spec.parse(f"router:q={q}") for q in (0.1, 0.2, 0.4)] + [Spec.parse("router/last:q=0.4")]
    found = looks(specs)
    assert len({(look.colour, look.marker) for look in found.values()}) == 4
    assert found[specs[2]].colour == found[specs[3]].colour == COLOURS["router"]
    assert len(set(COLOURS.values())) == len(COLOURS)
    other = Spec("topk-on-box")
    assert looks([other])[other].colour not in COLOURS.values()


def test_models_side_by_side(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for letter in "ab":
            store.add_model(letter * 64, f"model-{letter}", {})
            add(store, "1110", policy="dense", model=letter * 64)
        add(store, "1000", policy="topk", budget=8, model="a" * 64)
        found = gather(store)
        text = tables.side_by_side(found.settings).text()
        assert "Models side by side" in compose.page(found).text()
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["n_dc"][-4:] == ["-", "3", "-", "3"]
    assert rows["topk"][-4:] == ["0.25", "0.33", "-", "-"]


def run(*argv: str) -> None:
    root = Parser(prog="closecall")
    commands = root.add_subparsers()
    cli.REPORT(commands)
    args = root.parse_args(list(argv))
    args.run(args)


def test_the_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("report", "--store", str(path), "--out", str(tmp_path / "deep" / "out"), "--model", "tiny")
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) <= 4  # a verdict; the rest is in the files
    assert lines[0] == "tiny: niah-multikey at 8K, 40 questions; dense answers 90%"
    assert lines[1].startswith("Closest to dense: router, 8 (16 a tile) keeps 64% of its answers, reading 20.2 blocks")
    assert lines[2] == "Tests, Holm-corrected: no policy differs from another beyond chance."
    assert "written:" in err
    assert (tmp_path / "deep" / "out" / "report.html").is_file()
    run("report", "--store", str(path), "--out", str(tmp_path / "deep" / "out"), "--verbose")
    assert "Accuracy and paired recall" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; name a directory"):
        run("report", "--store", str(path), "--out", str(tmp_path / "file"))


def test_the_command_on_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no such store"):
        run("report", "--store", str(tmp_path / "none.db"))
    Store(tmp_path / "empty.db").close()
    with pytest.raises(ValueError, match="--model names nothing"):
        run("report", "--store", str(tmp_path / "empty.db"), "--model", ",")
    run("report", "--store", str(tmp_path / "empty.db"), "--out", str(tmp_path / "out"))
    assert "has no results of what was asked" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
