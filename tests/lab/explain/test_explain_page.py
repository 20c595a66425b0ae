"""The page in a real browser: it opens, it reacts, and its numbers are those of select, attend and certify."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from explain_pages import BUDGET, Browser, Explain, Loaded

import closecall
from closecall.hf.op import Call
from closecall_lab.explain.page import Explanation
from closecall_lab.explain.prompt import Prompt, from_text

LAYER, HEAD = 2, 1
PLACE = f"#layer={LAYER}&head={HEAD}"


def percent(share: float) -> str:
    """As template/data.js writes it."""
    value = 100 * share
    if value == 0:
        return "0%"
    if value < 0.01:
        return "<0.01%"
    return (f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:#.2g}") + "%"


def test_it_opens_from_disk_without_errors_or_requests(browser: Browser, pages: dict[str, Path]) -> None:
    for path in pages.values():
        browser.driver.get_log("performance")
        browser.open(path)
        assert browser.complaints() == []
        messages = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert {url for url in asked if not url.startswith(("about:", "blob:"))} <= {path.as_uri()}
        assert browser.run("return document.querySelectorAll('canvas').length") >= 2


def test_every_control_changes_what_is_shown(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    shown = {"map": "#canvases canvas", "strip": "#lanes canvas"}

    def pictures() -> dict[str, str]:
        return {name: browser.picture(selector) for name, selector in shown.items()}

    for view in ("score", "mass", "lost", "kept"):
        before = pictures(), browser.text("#map-legend")
        browser.click(f"[data-choice=view] [data-value={view}]")
        assert browser.state()["view"] == view
        after = pictures(), browser.text("#map-legend")
        assert all(after[0][name] != before[0][name] for name in shown)
        assert after[1] != before[1]
    for name in ("layer", "head", "tile", "block"):
        before_state, before = browser.state()[name], pictures()
        words = browser.text("#tile-panel") + browser.text("#block-panel")
        browser.click(f"[data-step={name}][data-by='-1']")
        assert browser.state()[name] != before_state
        assert pictures() != before
        assert browser.text("#tile-panel") + browser.text("#block-panel") != words
    for grid in ("margin", "kept", "lost"):
        before_grid = browser.run("return document.querySelector('#grids').innerHTML")
        browser.click(f"[data-choice=grid] [data-value={grid}]")
        assert browser.run("return document.querySelector('#grids').innerHTML") != before_grid
    before_calls = browser.texts("#calls-table tbody tr")
    browser.click("[data-choice=sort] [data-value=cost]")
    costliest = browser.texts("#calls-table tbody tr")
    browser.click("[data-choice=of] [data-value='1']")
    assert before_calls != costliest != browser.texts("#calls-table tbody tr")
    browser.click("[data-choice=sort] [data-value=close]")
    browser.click("[data-choice=of] [data-value='0']")  # the first has more of them than are shown at once
    shown_before = len(browser.texts("#calls-table tbody tr"))
    browser.click("#more")
    assert len(browser.texts("#calls-table tbody tr")) > shown_before
    for zoom in ("in", "out", "in", "whole"):
        before = pictures()
        browser.click(f"[data-zoom={zoom}]")
        assert pictures()["map"] != before["map"]
    browser.click("#help")
    assert browser.run("return document.querySelector('#how').open")
    assert browser.complaints() == []


def test_clicks_lead_everywhere(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.click("#grids td[data-layer='1'][data-head='3']")
    assert (browser.state()["layer"], browser.state()["head"]) == (1, 3)
    browser.click("#ladders tr[data-fate=dropped]")
    dropped = browser.state()["block"]
    assert browser.text("#block-number") == str(dropped)
    browser.click("#calls-table tbody tr")
    row = browser.run(
        "return [...document.querySelector('#calls-table tbody tr').children].slice(0, 4).map(n => +n.textContent)"
    )
    state = browser.state()
    assert [state[name] for name in ("layer", "head", "tile", "block")] == row
    # On the map: the cell under the pointer. On the strip: the block, and below it the tile.
    browser.run("""const map = maps[0], box = map.canvas.getBoundingClientRect();
        const where = {clientX: box.left + map.px(4.5), clientY: box.top + map.py(11.5), pointerId: 1};
        map.canvas.dispatchEvent(new PointerEvent('pointerdown', where));
        map.canvas.dispatchEvent(new PointerEvent('pointerup', where));""")
    browser.settle()
    assert (browser.state()["tile"], browser.state()["block"]) == (11, 4)
    for lane, name, wanted in ((0, "block", 7), (1, "tile", 15)):
        browser.run(
            """const box = lanes.getBoundingClientRect(), of = arguments[1] === 'block' ? D.blocks : D.tiles;
            const clientX = box.left + LABEL + (arguments[2] + 0.5) / of * (box.width - LABEL);
            const clientY = box.top + arguments[0] * (LANE + GAP) + 5;
            lanes.dispatchEvent(new MouseEvent('click', {clientX, clientY}))""",
            lane,
            name,
            wanted,
        )
        browser.settle()
        assert browser.state()[name] == wanted


def test_keys(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], PLACE + "&tile=10&block=5")
    for key, name, value in (
        ("ArrowLeft", "head", HEAD - 1), ("ArrowRight", "head", HEAD), ("ArrowUp", "layer", LAYER - 1),
        ("ArrowDown", "layer", LAYER), ("j", "tile", 11), ("k", "tile", 10), ("]", "block", 6), ("[", "block", 5),
        ("2", "view", "score"), ("4", "view", "lost"), ("1", "view", "kept"), ("m", "head", "mean"),
    ):  # fmt: skip
        browser.key(key)
        assert browser.state()[name] == value, key
    browser.key("?")
    assert browser.run("return document.querySelector('#how').open")


def test_links_restore_the_state(browser: Browser, pages: dict[str, Path]) -> None:
    address = "#layer=1&head=3&tile=12&block=2&view=lost&grid=margin&sort=cost&theme=dark&zoom=0.2500,0.5000,0.5000"
    browser.open(pages["two"], address)
    state = browser.state()
    assert [state[name] for name in ("layer", "head", "tile", "block", "view")] == [1, 3, 12, 2, "lost"]
    assert state["zoom"] == {"x": 0.25, "y": 0.5, "span": 0.5}
    assert browser.run("return document.documentElement.hasAttribute('data-dark')")
    assert browser.text("#tile-number") == "12"
    first = browser.picture("#canvases canvas")
    browser.key("ArrowLeft")
    link = str(browser.run("return location.hash"))
    assert "head=2" in link
    words, second = browser.text("#tile-panel"), browser.picture("#canvases canvas")
    browser.open(pages["two"], link)
    assert browser.text("#tile-panel") == words
    assert browser.picture("#canvases canvas") == second != first
    browser.run("location.hash = arguments[0]", address)
    browser.settle()
    assert browser.state()["head"] == 3
    browser.open(pages["two"], "#layer=99&head=-4&tile=zoo&view=nothing")
    assert browser.state()["layer"] == 2
    assert browser.complaints() == []


def test_numbers_are_those_of_select_attend_and_certify(
    browser: Browser, pages: dict[str, Path], calls: dict[int, Call], needle: Prompt
) -> None:
    policy = closecall.policy("router-on-quest", budget=BUDGET)
    browser.open(pages["one"], PLACE)
    for tile in (8, 13, len(needle.ids) // 64):
        browser.run("location.hash = arguments[0]", f"{PLACE}&tile={tile}")
        browser.settle()
        call = calls[LAYER]
        q, k, v = call.seen.q, call.seen.k, call.seen.v
        kept = closecall.select(q, k, policy, scale=call.scale)
        blocks = set(kept.kv_idx[0, HEAD, tile, : int(kept.counts[0, HEAD, tile])].tolist())
        if any(text.startswith("show all") for text in browser.texts(".unfold")):
            browser.click(".unfold")
        rows = browser.run(
            "const rows = [...document.querySelectorAll('#ladders tr[data-block]')];"
            "return rows.map(r => [+r.dataset.block, r.dataset.fate])"
        )
        assert {block for block, fate in rows if fate != "dropped"} == blocks
        assert {block for block, _ in rows} == set(range(tile + 1))
        # Lost mass: one minus the ratio of the two softmax sums, over kept keys and over all.
        _, lse = closecall.attend(q, k, v, kept, scale=call.scale, return_lse=True)
        _, whole = closecall.attention(q, k, v, "dense", scale=call.scale, return_lse=True)
        lost = 1 - (lse - whole)[0, HEAD, 64 * tile : 64 * tile + 64].double().exp()
        facts = browser.text("#ladders .facts")
        assert f"kept {len(blocks)} of {tile + 1} blocks" in facts
        shown = browser.run(
            "const at = arguments; return ['lost', 'lost_most'].map(name => fact(0, name, ...at))",
            LAYER,
            HEAD,
            tile,
        )
        assert shown == pytest.approx([float(lost.mean()), float(lost.max())], abs=3e-5)
        assert f"lost {percent(shown[0])} of its mass, {percent(shown[1])} in its worst row" in facts
        margin = browser.run("return fact(0, 'margin', arguments[0], arguments[1], arguments[2])", LAYER, HEAD, tile)
        assert margin == pytest.approx(float(kept.margin[0, HEAD, tile]), abs=2e-5)
        triggered = bool(kept.triggered[0, HEAD, tile])
        assert bool(browser.run("return document.querySelector('#ladders .triggered')")) == triggered
        # True masses, to the 8 bits they are stored in.
        logits = call.scale * q[0, HEAD, 64 * tile : 64 * tile + 64].double() @ k[0, HEAD // 2].double().T
        seen = torch.arange(k.shape[2]) <= torch.arange(64 * tile, 64 * tile + logits.shape[0])[:, None]
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).mean(0)
        true = torch.stack([weights[64 * b : 64 * b + 64].sum() for b in range(tile + 1)])
        stored = browser.driver.execute_async_script(
            "const [l, h, t, done] = arguments, seen = [...Array(D.visible[t]).keys()];"
            "field(0, l, h, 'mass').then(f => done(seen.map(b => valueAt(f, t, b))))",
            LAYER,
            HEAD,
            tile,
        )
        for exact, read in zip(true.tolist(), stored, strict=True):
            assert read == pytest.approx(exact, rel=0.03, abs=1.1e-5)
    cert = closecall.certify(q, k, v, kept, scale=call.scale)
    bound = float(cert.mass[0, HEAD, 64 * tile :].max())
    assert browser.run("return D.policies[0].layers[arguments[0]].bound[arguments[1]]", LAYER, HEAD) == pytest.approx(
        bound, abs=1e-5
    )
    assert f"no row lost more than {percent(bound)}" in facts


def test_sentences_and_close_calls_agree_with_the_selection(
    browser: Browser, pages: dict[str, Path], one: Explanation, calls: dict[int, Call]
) -> None:
    browser.open(pages["one"])
    kept = [call.kept for call in calls.values() if call.kept is not None]
    share = sum(int(s.counts.sum()) for s in kept) / sum(
        int(s.geometry.visible.sum()) * s.counts.shape[1] for s in kept
    )
    assert f"kept {100 * share:.0f}% of the blocks" in browser.text(".card")
    assert browser.texts(".card li") == one.data["policies"][0]["sentences"]
    for missed, mass, layer, head, tile, block in one.data["policies"][0]["calls"]:
        selection = calls[layer].kept
        assert selection is not None
        assert not bool(selection.kept_mask((0, head, tile))[block])
        assert 0 <= missed < 0.02
        assert 0 <= mass <= 1


def test_two_policies_differ_where_they_should(browser: Browser, pages: dict[str, Path], two: Explanation) -> None:
    browser.open(pages["two"], PLACE)
    assert browser.texts("#canvases h3") == ["topk:budget=3", "auto:budget=3", "difference"]
    counted = browser.run("""
        let both = 0, first = 0, second = 0;
        for (let t = 0; t < D.tiles; t++) for (let b = 0; b < D.visible[t]; b++) {
          const a = keeps(0, arguments[0], arguments[1], t, b), c = keeps(1, arguments[0], arguments[1], t, b);
          both += a && c; first += a && !c; second += c && !a; }
        return [both, first, second];""", LAYER, HEAD)  # fmt: skip
    masks = []
    for run in two.gathered.runs:
        layer = run.layers[LAYER]
        masks.append(int(layer.counts[HEAD].sum()))
    assert counted[0] + counted[1] == masks[0]
    assert counted[0] + counted[2] == masks[1]
    assert counted[1] > 0
    assert counted[2] > 0
    colours = browser.run("""
        const map = maps[2], data = map.picture.getContext('2d').getImageData(0, 0, D.blocks, D.tiles).data, seen = {};
        for (let t = 0; t < D.tiles; t++) for (let b = 0; b < D.visible[t]; b++) {
          const at = 4 * (t * D.blocks + b), key = [data[at], data[at + 1], data[at + 2]].join();
          seen[key] = (seen[key] || 0) + 1; }
        return [solid.both, solid.first, solid.second].map(c => seen[c.join()] || 0);""")
    assert colours == counted
    assert len(browser.texts(".card")) == 2


def test_true_masses_left_out(browser: Browser, explained: Explain, needle: Prompt, tmp_path: Path) -> None:
    made = explained(needle, "auto", truth=False, layers=[1])
    browser.open(made.save(tmp_path / "page.html"), "#view=mass")
    assert browser.state()["view"] == "kept"
    assert browser.run("return document.querySelector('[data-value=mass]').disabled")
    assert browser.state()["layer"] == 1
    assert "True masses were left out" in browser.text(".card")
    assert "true mass" not in browser.text("#ladders")
    assert browser.complaints() == []


def test_a_policy_that_runs_dense_says_so(browser: Browser, explained: Explain, needle: Prompt, tmp_path: Path) -> None:
    made = explained(needle, "dense", new_tokens=0)
    browser.open(made.save(tmp_path / "page.html"))
    assert "keeps every block by design" in browser.text(".card")
    assert "Nothing was dropped" in browser.text("#calls")
    browser.key("2")  # nothing was ranked: no scores to draw
    assert browser.complaints() == []


GRIDS = {"topk:block=32,tile=64,budget=4": (40, 20), "quest:block=64,tile=48,budget=4": (20, 27)}


@pytest.mark.parametrize("policy", GRIDS)
def test_blocks_and_tiles_of_different_sizes(
    browser: Browser, probe: Loaded, needle: Prompt, tmp_path: Path, policy: str
) -> None:
    made = closecall.explain(probe, {"input_ids": [list(needle.ids)]}, policy, layers=[1, 2], new_tokens=0)
    browser.open(made.save(tmp_path / "page.html"), "#layer=2&head=3&view=lost")
    assert browser.complaints() == []
    blocks, tiles = browser.run("return [D.blocks, D.tiles]")
    assert (blocks, tiles) == GRIDS[policy]
    counted = browser.run("""return Array.from({length: D.tiles}, (_, t) =>
        Array.from({length: D.visible[t]}, (_, b) => keeps(0, 1, 3, t, b)).filter(Boolean).length)""")
    assert counted == made.gathered.runs[0].layers[1].counts[3].tolist()
    browser.key("k")
    assert browser.text("#tile-number") == str(tiles - 2)


def test_a_prompt_of_a_few_words(browser: Browser, probe: Loaded, tmp_path: Path) -> None:
    made = closecall.explain(probe, "the old river", "auto", new_tokens=0)
    assert "auto ran dense" in str(made)
    browser.open(made.save(tmp_path / "page.html"))
    for key in ("2", "3", "4", "m", "ArrowUp", "j", "]"):
        browser.key(key)
    assert browser.complaints() == []
    assert browser.run("return [D.blocks, D.tiles]") == [1, 1]


HOSTILE = (
    '<b>bold</b> <img src=x onerror="window.ran=1"> </script><script>window.ran=2</script> <!-- --> &amp; {{ 7*7 }} '
    "\N{GRINNING FACE} \N{REGIONAL INDICATOR SYMBOL LETTER D}\N{REGIONAL INDICATOR SYMBOL LETTER E} "
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u2028 ${window.ran=3} `tick` "
)


def test_a_hostile_prompt_is_text(browser: Browser, probe: Loaded, explained: Explain, tmp_path: Path) -> None:
    whole = (HOSTILE + "the old river walked slowly . ") * 40 + "x" * 5000 + " . ask otter -> "
    prompt = from_text(probe.tokenizer, whole, answer="\N{GRINNING FACE}", question="ask otter ->")
    made = explained(prompt, "topk")
    browser.open(made.save(tmp_path / "page.html"))
    assert browser.complaints() == []
    assert browser.run("return window.ran") is None
    assert browser.run("return D.text") == whole
    assert browser.run("return document.querySelectorAll('img').length") == 0
    parts = browser.run("return Array.from({length: D.blocks}, (_, b) => blockText(b)).join('')")
    assert parts == whole
    marked = browser.texts("#block-text mark")
    assert marked
    assert set(marked) == {"\N{GRINNING FACE}"}
    assert "<img src=x onerror=" in browser.text("#block-text") + browser.text("#reading")
    for width in (1280, 390):
        browser.size(width, 900)
        browser.settle()
        assert browser.run("return document.documentElement.scrollWidth") <= width
    browser.size(1280, 900)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_in_both_themes(browser: Browser, pages: dict[str, Path], width: int, scheme: str) -> None:
    browser.size(width, 900)
    browser.prefer(scheme)
    try:
        for path in pages.values():
            browser.open(path)
            for view in ("kept", "score", "mass", "lost"):
                browser.click(f"[data-choice=view] [data-value={view}]")
                assert browser.run("return document.documentElement.scrollWidth") <= width
            assert browser.run("return document.documentElement.hasAttribute('data-dark')") == (scheme == "dark")
            page = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", page)[:3])) < 200) == (scheme == "dark")
            small = browser.run("""return [...document.querySelectorAll('button, select')].filter(n => n.offsetParent
                && n.getBoundingClientRect().height < 28).length""")
            assert small == 0
    finally:
        browser.size(1280, 900)
        browser.prefer("light")


def test_the_map_is_sharp(browser: Browser, pages: dict[str, Path]) -> None:
    """As many dots as the screen has, and zoomed cells of one colour from edge to edge."""
    browser.open(pages["one"], PLACE + "&zoom=0.0000,0.5000,0.2000")
    counted = browser.run("""
        const map = maps[0], ctx = map.canvas.getContext('2d'), dots = window.devicePixelRatio || 1;
        const colours = new Set();
        for (let i = 2; i < 12; i++) for (let j = 2; j < 12; j++) {
          const x = map.px(1) + (map.px(2) - map.px(1)) * i / 14, y = map.py(12) + (map.py(13) - map.py(12)) * j / 14;
          colours.add(ctx.getImageData(Math.round(x * dots), Math.round(y * dots), 1, 1).data.join()); }
        return [colours.size, map.canvas.width, Math.round(map.canvas.clientWidth * dots)];""")
    assert counted[0] == 1
    assert counted[1] == counted[2]


def test_drawing_stays_smooth_at_32k(browser: Browser, big: Explanation, tmp_path: Path) -> None:
    """512 x 512 cells, 30 x 12 maps: moving over the map is a matter of milliseconds, another map of some more."""
    browser.open(big.save(tmp_path / "big.html"), "#layer=0&head=3&view=lost")
    assert "cells of" not in browser.text("#map-note")
    times = browser.driver.execute_async_script("""
        const done = arguments[0], took = async (act, n) => {
          const all = [];
          for (let i = 0; i < n; i++) {
            const from = performance.now();
            await act();
            all.push(performance.now() - from);
          }
          return all.sort((a, b) => a - b)[0];
        };
        (async () => done([await took(() => maps[0].draw(), 9), await took(() => maps[0].load(), 5)]))();""")
    assert times[0] < 50  # the best of several: others may be using this machine
    assert times[1] < 500
    browser.key("ArrowUp")  # from the first layer to the mean of all, and on to the last, which is there coarsely
    assert browser.state()["layer"] == "mean"
    browser.key("ArrowUp")
    assert browser.state()["layer"] == 29
    browser.key("m")  # with one of its heads
    assert "cells of 8 x 8" in browser.text("#map-note")
    assert "not on this page in full" in browser.text("#ladders")
    first = browser.picture("#canvases canvas")
    browser.key("1")
    browser.settle()
    assert browser.text("#map-note") == ""  # what was kept is exact everywhere
    assert browser.picture("#canvases canvas") != first
    assert browser.complaints() == []


def test_a_notebook_gets_the_page_in_a_frame(browser: Browser, one: Explanation, tmp_path: Path) -> None:
    shown = one._repr_html_()
    assert "<script" not in shown  # all of it is the frame's
    page = tmp_path / "notebook.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{shown}")
    browser.driver.get_log("browser")
    browser.driver.get(page.as_uri())
    browser.driver.switch_to.frame(0)
    try:
        browser.until("return document.documentElement.dataset.ready === 'yes'")
        browser.key("ArrowUp")
        assert browser.state()["layer"] == 1
        assert browser.complaints() == []
    finally:
        browser.driver.switch_to.default_content()
