"""`closecall tune` from text to a policy file, on a probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import closecall
from closecall.cli import main
from closecall.rules.last_tile import LastTile
from closecall.rules.per_head import PerHead
from closecall_lab.probes.words import VOCABULARY
from closecall_lab.tune.allocate import costs_of
from closecall_lab.tune.fit import Fit
from closecall_lab.tune.judge import Judge, Verdict
from closecall_lab.tune.pieces import cut, halves
from closecall_lab.tune.search import Goal, protected, refine, search


class Words:
    """A tokenizer of words, with a start token."""

    bos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_pieces_are_whole_and_start_as_the_model_does() -> None:
    pieces = cut(Words(), [("a", "x yy " * 5), ("b", "zzz " * 11)], 6, 10)
    assert [len(piece.ids) for piece in pieces] == [6, 6, 6, 6]
    assert {piece.ids[0] for piece in pieces} == {0}
    assert pieces[0].name == "a"
    assert pieces[2].name == "a to b"
    assert len({piece.digest for piece in pieces}) == 3  # the last two read alike
    fitting, judging = halves(pieces)
    assert (len(fitting), len(judging)) == (2, 2)


def test_too_little_text_is_said_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"two pieces of 100 tokens.*the text has 11 tokens"):
        cut(Words(), [("b", "zzz " * 11)], 100, 10)


def like_all(rule: PerHead, candidate: closecall.Policy) -> float:
    """The budget that keeps as many blocks of 4096 tokens when every head has it, to the next whole one."""
    ends = np.arange(candidate.tile, 4096 + candidate.tile, candidate.tile)
    visible = -(-ends // candidate.block)
    whole = protected(candidate)
    others = costs_of(visible[:-whole] if whole else visible, int(visible[-1]))
    spent = np.mean([others[budget] for listed in rule.budgets for budget in listed])
    spent += visible[-whole:].sum() if whole else 0
    return float(round(np.interp(spent, costs_of(visible, int(visible[-1])), np.arange(visible[-1] + 1))))


class Verdicts(Judge):
    """Knows how good a policy is without running anything: the more blocks the better, and the slower."""

    slower: ClassVar[dict[int, float]] = {}  # how much slower a grid is than 64/64, by its block
    busier: ClassVar[dict[int, float]] = {}  # how much slower everything was when a grid was judged

    def __init__(self) -> None:
        super().__init__(None, [], Path(), print)  # type: ignore[arg-type]

    def verdict(self, candidate: closecall.Policy) -> Verdict:
        rule = candidate.rule.rule if isinstance(candidate.rule, LastTile) else candidate.rule
        mean = like_all(rule, candidate) if isinstance(rule, PerHead) else float(rule.keep)  # type: ignore[attr-defined]
        keys = mean * candidate.block  # finer grids read as many keys better, and more protected tiles the end
        harm = candidate.block / 64 / (keys / 64)
        end = harm / protected(candidate) if protected(candidate) else harm
        slower, busier = (by.get(candidate.block, 1.0) for by in (self.slower, self.busier))
        return Verdict(harm, end, 0.0, 1.0, mean, mean / 64, keys / 64 * slower * busier, 64.0 * busier)


@pytest.fixture
def fitted() -> Fit:
    steps = np.linspace(1, 0, 65)
    return Fit((0, 1), np.stack([np.stack([steps, steps / 4])] * 2))


def test_the_fewest_blocks_that_meet_a_kl_are_taken(fitted: Fit) -> None:
    tuned = search(fitted, closecall.policy("quest"), Goal(kl=0.1), Verdicts(), 4096)
    assert tuned.chosen.mean == 16
    assert [c.mean for c in tuned.tried] == [4, 8, 16]
    assert 16 <= tuned.chosen.policy.rule.mean_budget < 24  # type: ignore[attr-defined]  # large ones cost less
    assert tuned.measured["tuned"]["kl"] == 1 / 16


def test_the_most_blocks_that_meet_a_speed_are_taken(fitted: Fit) -> None:
    tuned = search(fitted, closecall.policy("quest"), Goal(speedup=4), Verdicts(), 4096)
    assert tuned.chosen.mean == 16
    assert "every head alike" in tuned.table().text()


def test_a_context_of_few_blocks() -> None:
    steps = np.linspace(1, 0, 6)
    few = Fit((0,), np.stack([np.stack([steps, steps])]), 16)
    assert few.policy(closecall.policy("quest", budget=2), 4.0).rule.mean_budget == 4  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"a context of 5 blocks is too short to search: .*use a longer --context"):
        search(few, closecall.policy("quest", budget=2), Goal(kl=0.1), Verdicts(), 320)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (Goal(kl=1e-3), r"no policy has a KL of at most 0\.001: the nearest, 32 blocks, has 0\.03125"),
        (Goal(speedup=100), r"no policy is 100 times as fast as dense: the fastest, 4 blocks, is 16\.00"),
    ],
)
def test_a_goal_that_nothing_meets_names_the_nearest(goal: Goal, message: str, fitted: Fit) -> None:
    with pytest.raises(ValueError, match=message):
        search(fitted, closecall.policy("quest"), goal, Verdicts(), 4096)


def fits(policy: closecall.Policy) -> Fit:
    steps = np.linspace(1, 0, 64 * 64 // policy.block + 1)
    return Fit((0, 1), np.stack([np.stack([steps, steps / 4])] * 2))


@pytest.mark.parametrize(
    ("slower", "grid", "tiles"), [({}, "32/32", 2), ({32: 1.5, 16: 3.0}, "64/64", 2), ({32: 1.04, 16: 3.0}, "32/32", 2)]
)
def test_a_grid_and_protected_tiles_are_taken_if_they_pay(slower: dict[int, float], grid: str, tiles: int) -> None:
    base, goal = closecall.policy("auto"), Goal(mean=8)
    judge = Verdicts()
    judge.slower = slower  # type: ignore[misc]
    tuned = refine(search(fits(base), base, goal, judge, 4096), goal, judge, fits, [(64, 64), (32, 32)], [1, tiles])
    assert tuned.measured["grid"] == grid
    assert tuned.measured["protected_tiles"] == tiles
    assert tuned.chosen.mean == 8 * 64 / int(grid.split("/")[1])
    assert len(tuned.tried) == 3
    assert tuned.even.policy.block == tuned.chosen.policy.block
    text = tuned.table().text()
    assert "grid 32/32" in text
    assert "last 2 tiles" in text


def test_time_is_held_against_dense_of_the_same_hour() -> None:
    """A command that was stopped may go on while the machine does something else."""
    base, goal = closecall.policy("auto"), Goal(mean=8)
    judge = Verdicts()
    judge.busier = {32: 2.0}  # type: ignore[misc]
    tuned = refine(search(fits(base), base, goal, judge, 4096), goal, judge, fits, [(32, 32)], [1])
    assert tuned.measured["grid"] == "32/32"


def test_what_does_not_meet_the_goal_is_not_taken() -> None:
    base, goal = closecall.policy("quest"), Goal(speedup=8)
    judge = Verdicts()
    judge.slower = {32: 1.03}  # type: ignore[misc]
    tuned = refine(search(fits(base), base, goal, judge, 4096), goal, judge, fits, [(32, 32)], [1, 2])
    assert tuned.measured["grid"] == "64/64"
    assert tuned.measured["protected_tiles"] == 0  # quest protects none, so there is nothing to try


def test_one_goal_at_a_time() -> None:
    with pytest.raises(ValueError, match="one goal"):
        Goal(mean=8, kl=0.1)
    with pytest.raises(ValueError, match="above 0"):
        Goal(kl=0.0)


def test_the_protection_of_last_tiles_stays(fitted: Fit) -> None:
    auto = fitted.policy(closecall.policy("auto"), 8)
    assert isinstance(auto.rule, LastTile)
    assert isinstance(auto.rule.rule, PerHead)
    assert (auto.rule.factor, auto.rule.pay) == ("dense", False)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in the probes' own words: they know no others."""
    known = [word for word in VOCABULARY if word.isalpha()]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(known[i * 7919 % len(known)] for i in range(6000)))
    return path


def test_from_text_to_a_policy_that_attaches(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, work = tmp_path / "tuned.json", tmp_path / "work"
    command = ["tune", "--model", "probe", "--text", str(words), "--context", "1k", "--pieces", "2", "--mean", "8",
               "--grids", "64/64,32/32", "--questions", "probe-needle:questions=4",
               "--out", str(out), "--work", str(work)]  # fmt: skip
    assert main(command) == 0
    first = capsys.readouterr()
    assert "every head alike" in first.out
    policy = closecall.Policy.load(out)
    assert policy.rule.made_for() == (0, 1, 2)
    assert policy.rule.heads() == (4, 64)
    measured = json.loads(out.read_text())["measured"]
    assert 0 <= measured["tuned"]["answers"] <= measured["tuned"]["dense_answers"] <= 4
    assert len(measured["fitted on"]) == len(measured["judged on"]) == 2
    assert measured["context"] == 1024
    assert 0 <= measured["tuned"]["kl"] < 10
    assert measured["tuned"]["kept_blocks"] <= measured["same blocks for every head"]["kept_blocks"] + 0.5
    monkeypatch.setattr("closecall_lab.tune.fit._curves_of", None)  # all of it is in the work directory
    monkeypatch.setattr("closecall_lab.tune.judge.read", None)
    monkeypatch.setattr("closecall_lab.tune.judge.ask", None)
    assert main(command) == 0
    assert capsys.readouterr().out == first.out
    for name in ("judged", "asked", "curves"):  # a damaged file is named, not trusted
        path = next(work.glob(f"{name}-*"))
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        assert main(command) == 2
        message = capsys.readouterr().err
        assert f"{path.name} is damaged" in message
        assert "delete it" in message
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "dense"], "ranks nothing"),
        (["--policy", "auto:share=group"], "tune fits a budget for each query head"),
        (["--mean", "-1"], "above 0"),
        (["--context", "32k"], "two pieces of 32768 tokens"),
        (["--grids", "64"], "such as 64/64,32/16, got '64'"),
        (["--tiles", "0"], "--tiles"),
        (["--context", "1k", "--tiles", "1,16"], "--tiles 16 would protect all 16 tiles of a prompt of 1024 tokens"),
        (["--grids", "0/64"], "such as 64/64,32/16, got '0/64'"),
        (["--mean", "nan"], "the goal must be a number above 0, got nan"),
        (["--speedup", "inf"], "the goal must be a number above 0, got inf"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--context", "1k", "--questions", "probe-needle"], "give it more, such as questions=8"),
        (["--context", "1k", "--questions", "needles"], "unknown task 'needles'"),
    ],
)
def test_bad_options(
    options: list[str], message: str, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "--model", "probe", "--text", str(words), "--out", str(tmp_path / "x.json"), "--questions", "no"]
    assert main([*command, "--work", str(tmp_path / "work"), *options]) == 2
    assert message in capsys.readouterr().err
