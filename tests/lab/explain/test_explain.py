"""What the page is made of, without a browser: prompts, codes, the size rule, sentences, and what bad input gets."""

from __future__ import annotations

import base64
import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explain_pages import BUDGET, Explain, Loaded
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import closecall
from closecall import cli, extensions
from closecall.geometry import plan
from closecall.hf.op import Call
from closecall_lab.explain import codes, look, pack
from closecall_lab.explain.cli import layer_numbers
from closecall_lab.explain.page import Explanation
from closecall_lab.explain.prompt import Prompt, from_inputs, from_text
from closecall_lab.explain.words import percent, remarks

WORDS = "the old river walked slowly . "


# -- codes: what is read back is what was stored, to the promised precision ------------------------------------------

shares = arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1))


def unpacked(text: str, kind: str = "u1") -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS), dtype=kind)


@given(shares)
def test_masses_are_kept_to_their_ratio(mass: np.ndarray[Any, Any]) -> None:
    code = unpacked(codes.packed(codes.mass_codes(mass))).astype(float)
    read = np.where(code == 0, 0.0, codes.FLOOR ** ((255 - code) / 254))
    assert np.all(np.abs(read - mass) <= np.maximum(0.024 * mass, codes.FLOOR))


@given(arrays.arrays(np.float64, st.integers(1, 40), elements=st.floats(-3, 1)))
def test_places_are_finest_at_the_cut(place: np.ndarray[Any, Any]) -> None:
    code = codes.score_codes(place)
    assert code.min() >= 1  # 0 is for what was not ranked
    u = (code.astype(float) - 128) / 127
    near = np.clip(place, -1, 1)
    assert np.all(np.abs(np.sign(u) * u * u - near) <= 0.5 / 127 * (2 * np.sqrt(np.abs(near)) + 0.5 / 127) + 1e-12)
    kept = codes.score_codes(place, np.ones(len(place), dtype=bool))
    dropped = codes.score_codes(place, np.zeros(len(place), dtype=bool))
    assert kept.min() > 128 >= dropped.max()
    assert codes.score_codes(np.array([np.nan]))[0] == 0


@given(shares)
def test_shares_are_kept_to_a_65534th(share: np.ndarray[Any, Any]) -> None:
    read = unpacked(codes.packed(codes.share_codes(share)), "<u2") / 65534
    assert np.all(np.abs(read - share) <= 0.5 / 65534 + 1e-12)
    assert codes.share_codes(np.array([np.nan]))[0] == codes.NAN


@pytest.mark.parametrize(("tokens", "block", "tile"), [(640, 64, 64), (1000, 64, 32), (500, 16, 64)])
def test_cells_are_what_tiles_see(tokens: int, block: int, tile: int) -> None:
    g = plan(1, tokens, tokens, block, tile)
    cells = codes.Cells(g.visible[0].numpy(), g.n_blocks, 3)
    values = np.random.default_rng(0).random((2, g.n_tiles, g.n_blocks))
    flat = cells.flat(values)
    assert flat.shape == (2, int(g.visible.sum()))
    at = 0
    for t, seen in enumerate(g.visible[0].tolist()):
        assert np.array_equal(flat[:, at : at + seen], values[:, t, :seen])
        at += seen
    coarse = cells.coarse(values)
    first = values[:, :3, :3][:, cells.seen[:3, :3]]
    assert np.allclose(coarse[:, 0], first.mean(-1))
    assert coarse.shape[1] == int(cells.coarse_seen.sum())


# -- what a layer is found to have done --------------------------------------------------------------------------------


def test_the_ranking_ends_where_the_selection_does(calls: dict[int, Call]) -> None:
    """The whole ranking, cut where the rule cut, gives the blocks that the selection kept."""
    policy = closecall.policy("router-on-quest", budget=BUDGET)
    for call in calls.values():
        assert call.kept is not None
        ranked = look.rank_all(call.seen.q, call.seen.k, policy, call.seen.geometry, call.scale)
        assert ranked.order.shape[-1] == call.seen.geometry.n_blocks
        free = call.kept.counts - ranked.forced[:, None]
        mask = call.kept.kept_mask()
        for h, t in np.ndindex(*free.shape[1:]):
            chosen = ranked.order[0, h, t, : int(free[0, h, t])].long()
            assert bool(mask[0, h, t][chosen].all())
            assert int(mask[0, h, t].sum()) == int(free[0, h, t] + ranked.forced[0, t])


def test_candidates_are_what_was_ranked(calls: dict[int, Call]) -> None:
    """Blocks that are no candidates of a tile were given no place; the kept ones come first."""
    policy = closecall.policy("topk", scorer="quest", budget=BUDGET, pool=8, candidates=2)
    for call in calls.values():
        seen = call.seen
        kept = closecall.select(seen.q, seen.k, policy, scale=call.scale)
        heads = slice(0, seen.q.shape[1] // seen.k.shape[1])
        places, _ = look._places(seen.q[:, heads], seen.k[:, :1], kept, heads, policy, call.scale)
        free = (kept.geometry.visible - kept.geometry.forced(policy.sinks))[0].numpy()
        most = policy.n_candidates(seen.geometry.n_blocks)
        assert (free > most).any()
        assert (np.isfinite(places).sum(-1) == np.minimum(free, most)).all()
        chosen = kept.kept_mask((0, heads)).numpy() & ~look.forced_mask(seen.geometry, policy.sinks)
        assert np.isfinite(places[chosen]).all()


def test_heads_that_share_are_shown_one_by_one(calls: dict[int, Call]) -> None:
    """One ranking of a KV head is that of each of its query heads."""
    policy = closecall.policy("auto", budget=BUDGET, share="group")
    seen = calls[min(calls)].seen
    ranked = look.rank_all(seen.q, seen.k, policy, seen.geometry, 0.1)
    group = seen.q.shape[1] // seen.k.shape[1]
    assert group > 1
    assert ranked.order.shape[1] == ranked.scores.shape[1] == seen.q.shape[1]
    assert np.array_equal(ranked.order[:, ::group], ranked.order[:, group - 1 :: group])
    assert not np.array_equal(ranked.order[:, 0], ranked.order[:, -1])


def test_margins_and_losses_are_those_of_the_operator(one: Explanation, calls: dict[int, Call]) -> None:
    for layer in one.gathered.runs[0].layers:
        call = calls[layer.layer]
        assert call.kept is not None
        assert np.array_equal(layer.margin, call.kept.margin[0].numpy(), equal_nan=True)
        assert np.array_equal(layer.counts, call.kept.counts[0].numpy())
        cut = ~call.kept.triggered[0].numpy()  # there the margin is that of the cut it came to
        assert np.allclose(layer.cut_margin[cut], layer.margin[cut], atol=1e-6, equal_nan=True)
        q, k, v = call.seen.q, call.seen.k, call.seen.v
        _, lse = closecall.attend(q, k, v, call.kept, scale=call.scale, return_lse=True)
        _, whole = closecall.attention(q, k, v, "dense", scale=call.scale, return_lse=True)
        lost = 1 - (lse - whole)[0].double().exp()
        for t in range(call.seen.geometry.n_tiles):
            rows = lost[:, 64 * t : 64 * t + 64]
            assert np.allclose(layer.lost[:, t], rows.mean(1), atol=1e-5)
            assert np.allclose(layer.lost_most[:, t], rows.amax(1), atol=1e-5)
        cert = closecall.certify(q, k, v, call.kept, scale=call.scale)
        last = cert.mass[0, :, 64 * (call.seen.geometry.n_tiles - 1) :]
        assert np.allclose(layer.bound, last.amax(1), atol=1e-6)
        assert np.all(layer.lost_most[:, -1] <= layer.bound + 1e-6)


def test_close_calls_are_all_found(one: Explanation, calls: dict[int, Call]) -> None:
    """By brute force from the scores: dropped blocks within CLOSE of the last kept one."""
    policy = closecall.policy("router-on-quest", budget=BUDGET)
    found = {tuple(call[2:]): call.missed_by for call in one.gathered.runs[0].calls.listed()}
    expected = {}
    for number, call in calls.items():
        assert call.kept is not None
        ranked = look.rank_all(call.seen.q, call.seen.k, policy, call.seen.geometry, call.scale)
        for h, t in np.ndindex(*ranked.scores.shape[1:3]):
            listed = int(ranked.visible[0, t] - ranked.forced[0, t])
            free = int(call.kept.counts[0, h, t] - ranked.forced[0, t])
            s = ranked.scores[0, h, t, :listed].double().numpy()
            for i in range(free, listed) if 0 < free < listed else ():
                missed = (s[free - 1] - s[i]) / (s[0] - s[free])
                if missed < look.CLOSE:
                    expected[number, h, t, int(ranked.order[0, h, t, i])] = missed
    assert len(expected) == one.gathered.runs[0].calls.count > 5
    assert set(found) == set(expected)
    assert all(found[key] == pytest.approx(expected[key], abs=1e-5) for key in found)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_blocks_put_together_are_the_text(probe: Loaded) -> None:
    text = "  " + WORDS * 30 + "\N{GRINNING FACE} \u05e9\u05dc\u05d5\u05dd " + WORDS * 20
    prompt = from_text(probe.tokenizer, text)
    starts = prompt.cut(64)
    assert "".join(text[a:b] for a, b in itertools.pairwise(starts)) == text[starts[0] :]
    assert text[: starts[0]].strip() == ""
    assert starts == sorted(starts)
    assert pack._utf16("a\N{GRINNING FACE}b", [0, 1, 2, 3]) == [0, 1, 3, 4]


def test_prompts_from_tokens(probe: Loaded) -> None:
    made = probe.tokenizer(WORDS * 20, return_tensors="pt")
    prompt = from_inputs(probe.tokenizer, made, answer="river")
    assert list(prompt.ids) == made["input_ids"][0].tolist()
    assert " ".join(prompt.text.split()[1:]) == (WORDS * 20).strip()
    assert len(prompt.answers) == 20
    bare = from_inputs(None, made["input_ids"])
    assert bare.text.split()[:3] == [str(i) for i in prompt.ids[:3]]
    with pytest.raises(ValueError, match="one prompt, and these inputs are 2"):
        from_inputs(probe.tokenizer, torch.ones(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="needs a tokenizer"):
        from_inputs(None, "text")


def test_answers_do_not_count_in_the_question(probe: Loaded) -> None:
    text = WORDS * 3 + "otter -> teal . " + WORDS * 40 + "ask otter -> teal or grey"
    prompt = from_text(probe.tokenizer, text, question="ask otter -> teal or grey", answer="teal")
    assert [text[a:b] for a, b in prompt.answers] == ["teal"]
    assert prompt.answer_blocks(64) == [0]
    assert prompt.asking_tiles(64)[-1] == (len(prompt.ids) - 1) // 64


# -- size --------------------------------------------------------------------------------------------------------------


def levels_of(made: dict[str, Any]) -> tuple[int, ...]:
    """How much of each layer is there, of all policies alike."""
    first, *others = [tuple(layer["detail"] for layer in run["layers"]) for run in made["policies"]]
    assert all(other == first for other in others)
    return first


def test_what_does_not_fit_is_left_out_by_the_rule(two: Explanation) -> None:
    whole = two.data
    assert {layer["detail"] for made in whole["policies"] for layer in made["layers"]} == {pack.FULL}
    size = len(two.html().encode())
    losses = [max(float(run.layers[i].lost.mean()) for run in two.gathered.runs) for i in range(3)]
    order = sorted(range(3), key=lambda i: -losses[i])
    seen = []
    for limit in range(size + 52_000, 0, -2_000):
        small = Explanation(two.gathered, limit=limit)
        try:
            made = small.data
        except ValueError as error:
            assert "do not fit" in str(error)  # noqa: PT017
            break
        if levels_of(made) in seen:
            continue
        assert len(small.html().encode()) <= limit
        levels = levels_of(made)
        seen.append(levels)
        if min(levels) < pack.FULL:
            assert any(f"below {limit / 1e6:g} MB" in text for text in made["remarks"])
            ranked = [levels[i] for i in order]
            assert ranked[0] >= ranked[-1]  # those that lost most come first
    assert seen[0] == (pack.FULL,) * 3
    assert any(set(levels) == {pack.EXACT, pack.FULL} for levels in seen)
    assert seen[-1] == (pack.EXACT,) * 3
    assert [sum(levels) for levels in seen] == sorted((sum(levels) for levels in seen), reverse=True)


def test_a_page_of_32k_and_30_layers_stays_below_15_mb(big: Explanation) -> None:
    assert 10e6 < len(big.html().encode()) < 15e6
    levels = levels_of(big.data)
    assert list(levels) == sorted(levels, reverse=True)  # these layers lose less and less
    assert min(levels) == pack.EXACT  # what was kept is exact everywhere
    assert max(levels) == pack.FULL
    assert "To stay below 15 MB" in big.data["remarks"][0]


# -- words -------------------------------------------------------------------------------------------------------------


def test_sentences_say_what_happened(two: Explanation) -> None:
    first, second = (made["sentences"] for made in two.data["policies"])
    assert first[0].startswith("topk:budget=3 kept ")
    assert second[0].startswith("auto:budget=3 kept ")
    assert any("The last tile lost" in text and "at most" in text for text in first)
    assert any(text.startswith("The last tile lost none of its attention mass; all tiles") for text in second)
    assert any("of them touched the answer" in text for text in first)
    assert any(text.startswith("The answer stands in block") for text in first)
    assert any("The model then wrote: “vanilla" in text and "as expected" in text for text in second)
    assert str(two).splitlines()[0] == first[0]


def test_an_answer_that_was_stopped_says_so(explained: Explain, needle: Prompt) -> None:
    made = explained(needle, "auto", truth=False, layers=[0], new_tokens=1)
    assert made.gathered.runs[0].stopped == 1
    assert any("“vanilla” and was stopped after 1 token, as expected." in text for text in made.sentences)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1, "100%"), (0.123, "12%"), (0.0314, "3.1%"), (0.00042, "0.042%"), (1e-9, "less than 0.01%")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_question_elsewhere_is_remarked(probe: Loaded, explained: Explain) -> None:
    text = WORDS * 5 + "ask otter -> " + WORDS * 150
    prompt = from_text(probe.tokenizer, text, question="ask otter ->", answer="submarine")
    made = explained(prompt, "topk", truth=False, new_tokens=0)
    said = remarks(made.gathered)
    assert said[0] == "The expected answer 'submarine' does not occur in the prompt: no block holds it."
    last = made.gathered.geometry.n_tiles - 1
    assert said[1] == f"The question is not in the prompt's last tile ({last}) but in tile 0: both count as asking."
    assert made.data["asking"] == [0, last]


# -- the command, and what bad input gets ------------------------------------------------------------------------------


def explain(*arguments: object) -> int:
    return cli.main(["explain", "--model", "probe", *map(str, arguments)])


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, out = tmp_path / "prompt.txt", tmp_path / "deep" / "page.html"
    prompt.write_text("<b>" + WORDS * 40 + "otter -> teal . " + WORDS * 120)
    question = ("--question", "ask otter ->", "--answer", "teal")
    options = ("--policy", "topk:budget=3,router:budget=3,q=0.5", "--tokens", 2, "--layers", "1-2")
    assert explain("--prompt", prompt, *question, *options, "--out", out) == 0
    said = capsys.readouterr()
    assert "topk:budget=3 kept " in said.out
    assert "router:budget=3,q=0.5 kept " in said.out
    assert "layer 2 of 2" in said.err
    page = out.read_text()
    assert "\\u003cb\\u003ethe old river" in page
    assert "<b>the old river" not in page


BAD = {
    "": "give the prompt's file with --prompt, or a --task",
    "--prompt {here}/nowhere.txt": "no prompt file",
    "--prompt {here}/empty.txt": "is empty: there is nothing to explain",
    "--prompt {here}/long.txt": "but probe reads 36,864: shorten the prompt",
    "--prompt {here}/short.txt --layers 7": "layer 7 has no full attention to show; those that have are 0 to 2",
    "--prompt {here}/short.txt --layers 2-1": "--layers takes numbers and ranges like 0-7,12, got '2-1'",
    "--prompt {here}/short.txt --policy topk,quest,auto": "explain shows one policy, or two side by side, got 3",
    "--prompt {here}/short.txt --policy toppk": "did you mean 'topk'?",
    "--prompt {here}/short.txt --policy topk,quest:block=32,budget=40": "laid over each other only on one grid",
    "--prompt {here}/short.txt --tokens -1": "--tokens takes a number of tokens",
    "--task probe-needle --tokens -1": "--tokens takes a number of tokens",
    "--prompt {here}/binary.txt": "is not UTF-8 text (invalid start byte at byte 4): convert it first",
    "--task probe-needle --answer teal": "brings its own question and answer",
    "--task probe-noodle": "did you mean 'probe-needle'?",
}


@pytest.mark.parametrize("arguments", BAD, ids=lambda text: text or "nothing")
def test_bad_input_gets_a_sentence(arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"text\xff")
    (tmp_path / "short.txt").write_text(WORDS * 40)
    (tmp_path / "long.txt").write_text(WORDS * 7000)
    out = tmp_path / "page.html"
    assert explain(*arguments.format(here=tmp_path).split(), "--out", out) == 2
    said = capsys.readouterr().err
    assert BAD[arguments] in said
    assert "Traceback" not in said
    assert not out.exists()


def test_a_budget_that_covers_everything_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(WORDS * 40)
    assert explain("--prompt", prompt, "--policy", "topk", "--tokens", 0, "--out", tmp_path / "page.html") == 0
    assert "topk ran dense: the prompt has 242 tokens, and a tile may keep 66 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "numbers"), [("3", [3]), ("0-2,7", [0, 1, 2, 7]), ("5,1-1", [1, 5])])
def test_layer_numbers(text: str, numbers: list[int]) -> None:
    assert layer_numbers(text) == numbers


def test_from_python(probe: Loaded, tmp_path: Path) -> None:
    made = closecall.explain(
        probe.model,
        WORDS * 100,
        closecall.policy("topk", budget=3),
        tokenizer=probe.tokenizer,
        new_tokens=0,
        layers=[0],
    )
    assert made.save(tmp_path / "page.html").stat().st_size > 50_000
    both = closecall.explain(probe, WORDS * 100, ["dense", "dense"], new_tokens=0, truth=False, layers=[0])
    assert [made["label"] for made in both.data["policies"]] == ["dense", "dense (2)"]


def test_without_the_lab_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "entry_points", lambda **_: [])
    with pytest.raises(ImportError, match=r"pip install \./lab"):
        closecall.explain(None, "text", "auto")
