"""Prompts with questions in tuning: which rows they add, and what becomes of their answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import closecall
from closecall_lab.eval.subject import Subject
from closecall_lab.tune.curves import Sample, curves, last_reads_all
from closecall_lab.tune.fit import fit
from closecall_lab.tune.pieces import Piece
from closecall_lab.tune.questions import SEED, Answers, Prompt, ask, prompts


@pytest.fixture(scope="module")
def probe() -> Any:
    return Subject.open("probe").loaded


@pytest.fixture(scope="module")
def needles(probe: Any) -> list[Prompt]:
    return prompts(probe, ["probe-needle:questions=4", "probe-chase:questions=2"], 1024, 4)


def test_prompts_come_in_pairs_so_that_both_halves_have_every_task(needles: list[Prompt]) -> None:
    assert [piece.name.split(":")[0] for piece in needles] == ["probe-needle"] * 2 + ["probe-chase"] * 2
    assert all(f"seed{SEED}" in piece.name for piece in needles)
    assert len({piece.digest for piece in needles}) == 4
    assert [len(piece.places) for piece in needles] == [4, 4, 2, 2]


def test_evidence_is_where_the_answer_stands_a_first_time(needles: list[Prompt]) -> None:
    piece = needles[0]
    told = {piece.ids[at] for at in piece.evidence}
    for start, stop in piece.places:
        assert set(piece.ids[start:stop]) <= told
        assert start > max(piece.evidence)


def test_a_task_that_asks_once_is_refused(probe: Any) -> None:
    with pytest.raises(ValueError, match=r"probe-needle asks one: give it more, such as questions=8"):
        prompts(probe, ["probe-needle"], 1024, 1)


def test_dense_answers_lose_nothing_and_few_blocks_lose_some(probe: Any, needles: list[Prompt]) -> None:
    dense = ask(probe.model, needles[0], closecall.policy("dense"))
    assert all(dense.right)
    assert dense.lost(dense) == 0
    assert dense.share == 1
    few = ask(probe.model, needles[0], closecall.policy("topk", budget=4, tile_factor=1))
    assert few.lost(dense) > 0
    assert few.kept(dense) == (sum(few.right), 4)
    assert few.blocks < dense.blocks


def test_questions_that_continue_a_prompt_are_asked_as_those_in_it(probe: Any, needles: list[Prompt]) -> None:
    """The last question of a prompt, cut out of it and asked behind it, gets the same answer."""
    whole = needles[0]
    start, stop = whole.places[-1]
    begin = whole.places[-2][1]
    question = (whole.ids[begin:start], whole.ids[start:stop])
    cut = dataclasses.replace(whole, ids=whole.ids[:begin], places=(), asks=(question, question))
    dense = closecall.policy("dense")
    inside, behind = ask(probe.model, whole, dense), ask(probe.model, cut, dense)
    assert behind.likely == pytest.approx([inside.likely[-1]] * 2, abs=1e-4)
    assert behind.right == (inside.right[-1],) * 2
    assert cut.asking == whole.ids[:start]


def test_where_dense_is_wrong_nothing_is_lost() -> None:
    dense = Answers((-0.1, -5.0), (True, False), 8, 1)
    other = Answers((-0.6, -9.0), (True, True), 4, 0.5)
    assert other.lost(dense) == pytest.approx(0.5)
    assert other.kept(dense) == (1, 1)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(1, 4, 1000, 32), torch.randn(1, 2, 1000, 32) * 2, torch.randn(1, 2, 1000, 32)


def test_wanted_rows_are_measured_besides_the_sample() -> None:
    q, k, v = drawn()
    policy = closecall.policy("quest", budget=5, tile_factor=1)
    sample, wanted = Sample(tiles=2, rows=1), [10, 500, 501, 960]  # the first one's tile has no choice
    rows = [192, 500, 501, 960]  # the sample: the first rows of the first and last tile that choose
    measured = curves(q, k, v, policy, 32**-0.5, sample, wanted=wanted)
    dense = closecall.attention(q, k, v, "dense", backend="reference")[:, :, rows]
    sparse = closecall.attention(q, k, v, policy, backend="reference")[:, :, rows]
    error = (sparse - dense).square().sum((0, 2, 3)) / dense.square().sum()
    assert torch.allclose(torch.from_numpy(measured[:, 5]).float(), error, atol=1e-6, rtol=1e-3)


def test_a_last_tile_that_reads_everything_is_left_out() -> None:
    q, k, _ = drawn()
    geometry = closecall.select(q, k, "quest").geometry
    assert [tile for tile, _ in Sample(tiles=2).of(geometry, 1, [970])] == [3, 15]
    assert [tile for tile, _ in Sample(tiles=2).of(geometry, 1, [970], last=False)] == [3, 14]
    assert last_reads_all(closecall.policy("auto"))
    assert not last_reads_all(closecall.policy("auto", factor=2))


def test_text_and_questions_count_alike(probe: Any, needles: list[Prompt], tmp_path: Any) -> None:
    quiet: list[str] = []
    texts = [Piece(f"text {n}", piece.ids[:960]) for n, piece in enumerate(needles[:2])]
    base = closecall.policy("auto", budget=4)

    def curve(*pieces: Piece) -> Any:
        return fit(probe, pieces, base, tmp_path, say=quiet.append).curves

    both, text, asked = curve(*texts, needles[0]), curve(*texts), curve(needles[0])
    text = np.pad(text, ((0, 0), (0, 0), (0, both.shape[2] - text.shape[2])), mode="edge")
    text /= text[..., both.shape[2] // 8].sum()
    assert both == pytest.approx((text + asked) / 2)
