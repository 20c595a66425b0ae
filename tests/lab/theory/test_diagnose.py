"""The diagnosis: cells against the operator and brute force, dumps there and back, answers known beforehand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import made
import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

import closecall
from closecall.cli import Parser
from closecall.scorers.base import Scorer
from closecall.vllm.settings import Settings
from closecall_lab.eval.subject import Subject
from closecall_lab.tasks.example import Encoded, Example, Question
from closecall_lab.theory import certified, signals
from closecall_lab.theory import dump as dump_module
from closecall_lab.theory.analysis import analyse, fire_all, head_noise
from closecall_lab.theory.cells import COLUMNS, STATISTICS, check_scorer, measure
from closecall_lab.theory.cli import COMMANDS
from closecall_lab.theory.diagnose import Study, asked_at, diagnose
from closecall_lab.theory.diagnose_report import best_signal, findings_of, markdown, verdict
from closecall_lab.theory.dump import KEY, NAME, Dump, Writer
from closecall_lab.theory.loss import row_shares
from closecall_lab.theory.tightness import dropped

GRID = {"block": 16, "tile": 16, "budget": 5, "tile_factor": 1, "rho": 1.4}
N = 205  # the last tile and block are short


SCALE = 0.25


def tensors(seed: int = 0, *, exactly: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys; exactly: whole numbers, so that no order of additions rounds a score."""
    generator = torch.Generator().manual_seed(seed)
    if exactly:
        return tuple(torch.randint(-3, 4, (h, N, 16), generator=generator).float() for h in (4, 2))  # type: ignore[return-value]
    return tuple(2 * torch.randn(h, N, 16, generator=generator) for h in (4, 2))  # type: ignore[return-value]


def measured(q: torch.Tensor, k: torch.Tensor, **options: Any) -> dict[str, dict[str, np.ndarray]]:
    """By scorer, the columns of all tiles; and their ranked scores, one array a cell."""
    policies = [closecall.policy(name, **GRID) for name in ("router", "router-on-quest")]
    parts = list(measure(q, k, policies, scale=SCALE, **options))
    rows = {}
    for i, scorer in enumerate(("mean", "quest")):
        names = [c for c in COLUMNS if c not in ("example", "layer")]
        rows[scorer] = {c: np.concatenate([p[i].columns[c].numpy() for p in parts]) for c in names}
        rows[scorer]["scores"] = np.array([row for p in parts for row in p[i].scores.numpy()], dtype=object)
    return rows


# -- cells ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("scorer", ["mean", "quest"])
def test_cells_are_what_select_and_attention_say(scorer: str, softcap: float) -> None:
    q, k = tensors(exactly=True)
    gold = {9: [3, 5, 9], 12: [2]}  # the tile's own block is forced, not gold
    columns = measured(q, k, softcap=softcap, gold=gold)[scorer]
    name = {"mean": "topk", "quest": "quest"}[scorer]
    grid = {key: GRID[key] for key in ("block", "tile", "tile_factor")}
    plain, wide = (closecall.policy(name, budget=b, **grid) for b in (5, 7))
    selections = [closecall.select(q[None], k[None], p, scale=SCALE, backend="reference") for p in (plain, wide)]
    lost = [dropped(q[None], k[None], k[None], s, scale=SCALE, softcap=softcap)[0][0] for s in selections]
    assert set(columns["tile"]) == set(range(7, 13))  # they see 8 to 13 blocks, more than 7
    assert len(columns["tile"]) == 6 * 4
    for i, (h, t) in enumerate(zip(columns["head"], columns["tile"], strict=True)):
        rows = slice(16 * t, min(16 * t + 16, N))
        assert columns["margin"][i] == selections[0].margin[0, h, t]
        assert columns["lost"][i] == pytest.approx(float(lost[0][h, rows].mean()), abs=2e-6)
        assert columns["lost_most"][i] == pytest.approx(float(lost[0][h, rows].max()), abs=2e-6)
        assert columns["lost_expanded"][i] == pytest.approx(float(lost[1][h, rows].mean()), abs=2e-6)
        assert (columns["keep"][i], columns["expanded"][i], columns["visible"][i]) == (3, 5, t + 1)
        assert columns["gold"][i] == {9: 2, 12: 1}.get(int(t), 0)
        for column, selection in zip(("gold_lost", "gold_lost_expanded"), selections, strict=True):
            kept = selection.kv_idx[0, h, t].tolist()
            assert columns[column][i] == sum(b not in kept for b in gold.get(int(t), []) if b != t)
        scores = columns["scores"][i].astype(np.float64)
        assert columns["cutoff"][i] == pytest.approx(scores[2] - scores[3])
        assert columns["expansion"][i] == pytest.approx(scores[2] - scores[5])
        assert columns["spread"][i] == pytest.approx(scores[0] - scores[3])
        other = np.delete(-np.diff(scores), 2)
        assert columns["floor"][i] == pytest.approx(other.min())
        assert columns["spacing_p50"][i] == pytest.approx(np.quantile(other, 0.5))
        weights = np.exp(scores - scores.max())
        assert columns["tail"][i] == pytest.approx(weights[3:].sum() / weights.sum(), rel=1e-5)
        rounded = torch.from_numpy(columns["scores"][i].astype(np.float32)).bfloat16().float().numpy()
        assert columns["cutoff_bf16"][i] == rounded[2] - rounded[3]
        assert columns["ties_bf16"][i] == pytest.approx((np.diff(rounded) == 0).mean())


@pytest.mark.parametrize("scorer", ["mean", "quest"])
def test_noise_and_estimated_mass_from_rows(scorer: str) -> None:
    q, k = tensors(1)
    columns = measured(q, k)[scorer]
    made_by = closecall.SCORERS[scorer]()
    for i in (3, 17, 23):
        h, t = int(columns["head"][i]), int(columns["tile"][i])
        rows = q[h, 16 * t : min(16 * t + 16, N)]
        free = made_by.summarise(k[h // 2, 16 : 16 * t].double(), 16)
        scores = SCALE * made_by.row_scores(rows.double(), free)
        assert columns["tau"][i] == pytest.approx(math.sqrt(float(scores.diff(dim=0).square().mean()) / 2), rel=1e-5)
        position = torch.arange(16 * t, 16 * t + len(rows))
        forced = torch.cat([torch.arange(16), torch.arange(16 * t, 16 * t + len(rows))])
        logits = SCALE * rows.double() @ k[h // 2, forced].double().mT
        exact = logits.masked_fill(forced > position[:, None], -torch.inf).exp().sum(1)
        guess = 16 * scores.exp()
        order = scores.amax(0).sort(descending=True, stable=True).indices
        share = guess[:, order] / (exact + guess.sum(1))[:, None]
        assert columns["estimated"][i] == pytest.approx(float(share[:, 3:].sum(1).mean()), rel=1e-4)
        assert columns["estimated_expanded"][i] == pytest.approx(float(share[:, 5:].sum(1).mean()), rel=1e-4)


def test_shares_are_a_softmax_by_block() -> None:
    q, k = tensors(2)
    shares, weight = row_shares(q, k, slice(100, 116), 116, block=16, scale=SCALE)
    assert shares.shape == (4, 16, 8)
    assert torch.allclose(shares.sum(-1), torch.ones(4, 16))
    logits = SCALE * q[3, 107].double() @ k[1, :108].double().mT
    assert float(weight[3, 7]) == pytest.approx(float(logits.logsumexp(0)), rel=1e-6)
    assert float(shares[3, 7, 2]) == pytest.approx(float(logits.softmax(0)[32:48].sum()), rel=1e-5)


def test_scores_that_are_not_numbers_are_kept_as_such_and_counted(tmp_path: Path) -> None:
    q, k = tensors(3)
    clean = measured(q, k)["mean"]
    k[1, 40] = torch.nan  # block 2 of the second key head
    q[0, 130] = torch.inf  # one row of tile 8
    found = measured(q, k)["mean"]
    broken = (found["head"] >= 2) | ((found["head"] == 0) & (found["tile"] == 8))
    for name in STATISTICS:
        assert np.isnan(found[name][broken]).all(), name
        assert np.array_equal(found[name][~broken], clean[name][~broken]), name
    policies = [closecall.policy("router", **GRID)]
    tiles = [(0, 0, part[0]) for part in measure(q, k, policies, scale=SCALE)]
    facts = {"tile_budget": 5, "expanded_budget": 7, "rho": 1.4}
    one = analyse(Dump(made.dump(tmp_path / NAME, tiles, **facts)), "made", samples=4)
    assert one.not_numbers == broken.sum() == 13
    assert len(one.cells["margin"]) == len(broken) - 13
    assert "13 cells with scores that are not numbers" in markdown([one])


def test_what_cannot_be_diagnosed() -> None:
    class Opaque(Scorer):
        name = "opaque"

    with pytest.raises(ValueError, match="'opaque' does not score rows"):
        check_scorer(Opaque())
    with pytest.raises(ValueError, match=r"no tile of 4096 tokens sees more than 132 blocks.*at least 8449 tokens"):
        Study("probe", "probe-needle", 4096)
    with (
        pytest.warns(UserWarning, match="decides nothing"),
        pytest.raises(ValueError, match="must exceed the 3 blocks"),
    ):
        Study("probe", "probe-needle", 4096, budget=1)
    with pytest.raises(ValueError, match="'dense' or 'policy'"):
        Study("probe", "probe-needle", 2**16, prefill="sparse")  # type: ignore[arg-type]
    q, k = tensors()
    with pytest.raises(ValueError, match=r"topk never expands a tile"):
        next(measure(q, k, [closecall.policy("topk")], scale=1.0))
    with pytest.raises(ValueError, match="pool = 8: noise is told from the scores of single rows"):
        next(measure(q, k, [closecall.policy("router", pool=8)], scale=1.0))
    with pytest.raises(ValueError, match="share = 'group': noise is told from the scores of single heads"):
        next(measure(q, k, [closecall.policy("router", share="group")], scale=1.0))
    Study("probe", "probe-needle", 8449)


# -- dumps ---------------------------------------------------------------------------------------------------------


def ranked(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).sort(-1, descending=True).values


def test_a_dump_comes_back_as_it_was(tmp_path: Path) -> None:
    cells = [made.rows(ranked(2, 6 + t, seed=t), t, 2, 4, lost=0.25) for t in range(3)]
    path = made.dump(tmp_path / "deep" / NAME, [(7, 1, c) for c in cells])
    dump = Dump(path)
    assert dump.facts["model"] == "made up"
    assert Dump(path.parent).path == path
    columns = dump.columns(["example", "layer", "tile", "head", "margin", "lost"], "made")
    assert columns["tile"].tolist() == [0, 0, 1, 1, 2, 2]
    assert columns["head"].tolist() == [0, 1] * 3
    assert set(columns["example"]) == {7}
    assert set(columns["layer"]) == {1}
    assert (columns["lost"] == 0.25).all()
    assert columns["margin"].tolist() == torch.cat([c.columns["margin"] for c in cells]).tolist()
    (scores,) = dump.scores("made")
    assert scores.shape == (6, 8)
    assert scores[2, :7].tolist() == cells[1].scores[0].tolist()
    assert np.isneginf(scores[:4, 7]).all()


def test_a_layer_is_written_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a layer is computed a row group at a time."""
    monkeypatch.setattr(dump_module, "_HELD", 20)
    cells = [(0, layer, made.rows(ranked(2, 6, seed=t), t, 2, 4)) for layer in (0, 1) for t in range(3)]
    groups = list(Dump(made.dump(tmp_path / NAME, cells)).scores("made"))
    assert [len(group) for group in groups] == [6, 6]


def test_nothing_is_asked_in_a_context_that_questions_continue() -> None:
    questions = (Question(("two",), gold=((0, 3),), ask="Which?"),)
    example = Example("t", "k", 100, "one two three", questions, 4)
    encoded = Encoded([1, 2, 3], [(0, 3), (4, 7), (8, 13)])
    assert asked_at(example, encoded, 2, 2) == {}
    there = dataclasses.replace(example, questions=(Question(("two",), gold=((0, 3),)),))
    assert asked_at(there, encoded, 2, 2) == {1: [0]}


def test_what_is_no_dump(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no dump at"):
        Dump(tmp_path)
    (tmp_path / NAME).write_text("hello")
    with pytest.raises(ValueError, match="not a Parquet file"):
        Dump(tmp_path)
    table = pyarrow.table({"a": [1]})
    pyarrow.parquet.write_table(table, tmp_path / NAME)
    with pytest.raises(ValueError, match="not a dump of `closecall diagnose`"):
        Dump(tmp_path)
    pyarrow.parquet.write_table(table.replace_schema_metadata({KEY: b'{"semantics": 99}'}), tmp_path / NAME)
    with pytest.raises(ValueError, match="semantics 99, and this closecall reads 1: diagnose again"):
        Dump(tmp_path)


def test_an_interrupted_dump_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Writer(tmp_path / NAME, made.FACTS) as writer:
            writer.add("made", 0, 0, made.rows(ranked(2, 6), 0, 2, 4))
            writer.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


# -- answers known beforehand --------------------------------------------------------------------------------------


def known(tmp_path: Path, prompts: int = 3, n_tiles: int = 10) -> Dump:
    """Two layers of two heads. Tiles differ by their gap at the cut only, and lose the more the smaller it is."""
    cells = []
    for example in range(prompts):
        for layer in range(2):
            for t in range(n_tiles):
                gap = 0.1 + 0.1 * ((7 * t + example) % n_tiles) + layer
                scores = torch.tensor([[12.0, 8.0 + gap, 8.0, 4.0, 2.0]]).repeat(2, 1)
                values = {"lost": 0.9 - 0.2 * gap, "lost_expanded": 0.1, "tail": gap, "estimated": 0.5}
                asked = {"gold": 1, "gold_lost": int(gap - layer < 0.35), "gold_lost_expanded": 0}
                cells.append((example, layer, made.rows(scores, t, 2, 4, **values, **asked)))
    return Dump(made.dump(tmp_path / NAME, cells))


def test_a_perfect_signal_is_found_and_a_wrong_one_too(tmp_path: Path) -> None:
    one = analyse(known(tmp_path), "made", samples=64)
    assert one.signal("margin").regained.value == pytest.approx(1)
    assert one.signal("margin").lost.value == pytest.approx(1)
    assert one.signal("margin").cells.value == pytest.approx(1)
    assert one.signal("margin").regained.error == pytest.approx(0, abs=1e-12)
    assert one.signal("margin").gold == 1
    assert one.signal("tail").regained.value == pytest.approx(-1)
    assert one.signal("tail").gold == 0
    assert math.isnan(one.signal("mass").regained.value)  # the same everywhere
    assert abs(one.signal("random").regained.value) < 0.6
    assert one.signal("margin").by_layer[1].value == pytest.approx(1)
    assert best_signal(one) == "gap"
    assert "sigma is a good signal" in verdict(one)
    assert "no other signal" in verdict(one)


def test_one_prompt_has_no_error_and_proves_nothing(tmp_path: Path) -> None:
    cells = []
    for t in range(10):
        scores = torch.tensor([[12.0, 8.1 + 0.1 * (3 * t % 10), 8.0, 4.0, 2.0]])
        cells.append((0, 0, made.rows(scores, t, 2, 4, lost=0.1 * t, tail=0.1 * t)))
    one = analyse(Dump(made.dump(tmp_path / "1" / NAME, cells)), "made", samples=4)
    assert one.signal("tail").regained.value == pytest.approx(1)
    assert "no other signal from the ranked scores is clearly better" in verdict(one)
    two = analyse(
        Dump(made.dump(tmp_path / "2" / NAME, [(e, 0, c) for e in (0, 1) for *_, c in cells])), "made", samples=4
    )
    assert "tail, from the same ranked scores, is better (+1.00 ± 0.00)" in verdict(two)


def test_triggers_fire_their_share_and_the_margin_finds_the_gold(tmp_path: Path) -> None:
    one = analyse(known(tmp_path), "made", samples=64)
    fired = {t.name: t for t in one.triggers}
    for name in ("quantile", "random", "last", "per-cell", "gap", "tail-gain", "mass-gain"):
        assert fired[name].regret.fired == pytest.approx(0.4)
    best = fired["quantile"]
    assert best.regained == pytest.approx(best.best)
    assert best.gold_lost == 0
    assert fired["tail-gain"].gold_lost == pytest.approx(0.3)  # it expands the widest gaps, and loses all there is
    assert fired["last"].regained < fired["quantile"].regained
    # V* falls with the gap, so the margin's choice is the best one: no regret beyond what noise makes of ties.
    assert max(best.regret.low, 0) <= 3 * best.regret.error
    assert fired["tail-gain"].regret.low > 3 * fired["tail-gain"].regret.error
    assert best.regret.avoided > fired["tail-gain"].regret.avoided
    assert one.gain.q == pytest.approx(0.4)
    assert one.q_star[0] > one.q_star[1]  # gaps are wider by 1 in layer 1: expansion is worth less there


def test_calibrated_takes_its_thresholds_from_the_other_prompts(tmp_path: Path) -> None:
    one = analyse(known(tmp_path), "made", samples=4)
    fired = {t.name: t for t in one.triggers}["calibrated"]
    assert fired.regret.fired == pytest.approx(0.4)  # all prompts have the same gaps, in another order
    alone = analyse(known(tmp_path / "alone", prompts=1), "made", samples=4)
    assert "calibrated" not in {t.name for t in alone.triggers}
    cells = one.cells
    for layer in (0, 1):  # by hand: the 8th smallest of the 20 tiles of the two other prompts
        mine = (cells["layer"] == layer) & (cells["head"] == 0)
        for example in range(3):
            others = np.sort(cells["margin"][mine & (cells["example"] != example)])
            wanted = cells["margin"][mine & (cells["example"] == example)] <= (float(others[7]) + float(others[8])) / 2
            got = fire_all(cells, 0.4)["calibrated"].numpy()[mine & (cells["example"] == example)]
            assert np.array_equal(got, wanted)


def test_scales_by_hand(tmp_path: Path) -> None:
    one = analyse(known(tmp_path), "made", samples=4)
    gaps = np.sort(np.array([0.1 + 0.1 * i for i in range(10)]))
    for scale in one.scales:
        assert scale.tau == pytest.approx(1)
        assert scale.cutoff_q == pytest.approx(np.quantile(np.repeat(gaps, 6), 0.4) + scale.layer, rel=1e-5)
        assert scale.variation == pytest.approx(0, abs=1e-6)  # the spread is 4 everywhere
        assert scale.spread_q == pytest.approx(4)
        assert scale.tied == 0
        assert (scale.spacing_p10, scale.spacing_p50) == (0.25, 0.5)
        assert len(scale.bounds) == 3
    text = markdown([one])
    assert "--model made up" in text
    assert "## Triggers on made" in text


def test_a_head_without_noise_is_worth_nothing_and_said(tmp_path: Path) -> None:
    tau = torch.tensor([1.0, 0.0])
    cells = [(0, 0, made.rows(ranked(2, 9, seed=t), t, 2, 4, tau=tau, lost=0.1 * t)) for t in range(8)]
    one = analyse(Dump(made.dump(tmp_path / NAME, cells)), "made", samples=64)
    assert one.silent == 8
    assert bool((one.estimate.value[one.cells["head"] == 1] == 0).all())
    assert bool((one.estimate.value[one.cells["head"] == 0] > 0).all())
    assert "8 cells of heads with tau-hat 0" in markdown([one])


def test_noise_is_a_root_mean_square_by_head() -> None:
    cells = {"layer": np.zeros(5, int), "head": np.array([0, 1, 0, 1, 0]), "tau": np.array([3, 1, 4, np.nan, np.nan])}
    assert head_noise(cells).tolist() == pytest.approx([math.sqrt(12.5), 1, math.sqrt(12.5), 1, math.sqrt(12.5)])
    with pytest.raises(ValueError, match="no tile of two rows"):
        head_noise(cells | {"tau": np.array([3, np.nan, 4, np.nan, np.nan])})


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=30))
def test_ranks_correlations_and_auc_are_scipys(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    mine = signals.spearman(x, y)
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert mine == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    else:
        assert math.isnan(mine)
    event = y > 2
    if 0 < event.sum() < len(event):
        u = scipy.stats.mannwhitneyu(x[event], x[~event]).statistic
        one = u / (event.sum() * (~event).sum())
        assert signals.auc(x, event, np.zeros(len(x))) == pytest.approx(one)
        # A second group of other sizes and another shift: pairs are compared within groups only.
        both = [np.concatenate(pair) for pair in ((x, x[::-1] + 100), (event, event[::-1]))]
        assert signals.auc(*both, np.repeat([0, 1], len(x))) == pytest.approx(one)
    else:
        assert math.isnan(signals.auc(x, event, np.zeros(len(x))))


def test_means_are_over_prompts() -> None:
    found = signals.Mean.over({0: [1.0, 3.0], 1: [math.nan, 4.0], 2: [math.nan]})
    assert (found.value, found.n) == (3, 2)
    assert found.error == pytest.approx(1)
    assert signals.Mean.over({}).n == 0


# -- a real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.open("probe")


STUDY: dict[str, Any] = {"model": "probe", "task": "probe-scattered", "context": 2048, "n": 2, "budget": 6}


PICTURES = [f"{name}.{kind}" for name in ("margins", "value", "regret", "tightness") for kind in ("png", "svg")]


def command(*arguments: str) -> None:
    parser = Parser()
    commands = parser.add_subparsers()
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(arguments)
    args.run(args)


def test_the_command_diagnoses_a_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--{key}={value}" for key, value in STUDY.items()]
    command("diagnose", *options, "--out", str(tmp_path), "--samples", "4", "--certify", "6")
    printed = capsys.readouterr()
    assert "prompt 2 of 2" in printed.err
    for said in ("Scales and regime: probe, probe-scattered", "tile budget 12, expanded 24", "Triggers on quest"):
        assert said in " ".join(printed.out.split())
    assert "sigma is" in printed.out
    assert "Certified rows" in printed.out
    assert {p.name for p in tmp_path.iterdir()} == {
        NAME, "certified.json", "report.md", *PICTURES,
    }  # fmt: skip
    page = (tmp_path / "report.md").read_text()
    assert "`closecall diagnose --model probe --task probe-scattered --context 2048" in page
    assert "--certify 6`" in page
    shares = certified.read(tmp_path)
    assert [(s.scorer, s.budget) for s in shares] == [("mean", 6), ("quest", 6)]
    for share in shares:
        assert share.mass <= share.bound + 1e-4 * share.rows
        proved, could = share.at(0.1)
        assert 12 / 32 < proved < could < 1  # the first 12 tiles keep everything
        assert share.certified[-1] == share.really[-1] == share.rows
    again = markdown(findings_of(Dump(tmp_path), samples=4), [certified.table(shares)], PICTURES[::2], "6")
    assert again == page


def test_under_its_own_prefill_the_cells_are_those_of_the_selections(subject: Subject, tmp_path: Path) -> None:
    study = Study(**STUDY | {"n": 1}, prefill="policy")
    logged: list[str] = []
    diagnose(study, tmp_path / NAME, subject=subject, log=logged.append)
    assert len(logged) == 1
    dump = Dump(tmp_path)
    from closecall_lab import tasks
    from closecall_lab.tasks import encode_example

    task = tasks.get(study.task)
    loaded = subject.loaded
    example = next(iter(task.examples(loaded.tokenizer, 2048, 1, 0, wrap=loaded.prompt)))
    ids = torch.tensor([encode_example(loaded.tokenizer, example).ids])
    for policy, scorer in zip(study.policies, study.scorers, strict=True):
        seen: dict[int, closecall.Selection] = {}
        with torch.no_grad(), closecall.attach(loaded.model, policy) as handle:
            handle.watch(lambda layer, selection, seen=seen: seen.update({layer: selection}))
            loaded.model(ids)
        found = dump.columns(["layer", "head", "tile", "margin"], scorer)
        assert len(found["tile"]) == len(seen) * 8 * loaded.model.config.num_attention_heads
        for layer, h, t, margin in zip(*found.values(), strict=True):
            assert margin == pytest.approx(float(seen[layer].margin[0, h, t]), abs=1e-4)


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    for arguments, says in (
        (["diagnose", "--task", "probe-needle"], "--model is missing"),
        (["diagnose", "--model", "probe"], "--task is missing"),
        (["diagnose", "--report", str(tmp_path)], "no dump at"),
        (["diagnose", "--report", str(tmp_path), "--model", "probe"], "drop --model"),
        (["diagnose", "--model", "probe", "--task", "probe-needle", "--scorers", "quests"], "did you mean 'quest'"),
        (["diagnose", "--model", "probe", "--task", "probe-needle", "--context", "4k"], "at least 8449 tokens"),
        (["calibrate", "--model", "probe", "--task", "probe-needle", "--out", "."], "is a directory; name a file"),
        (["diagnose", "--model", "probe", "--task", "probe-needle", "--budget", "8", "--out", __file__], "is a file"),
        (["calibrate", "--model", "probe", "--task", "probe-needle", "--policy", "topk"], "never triggers a tile"),
        (["calibrate", "--model", "probe", "--task", "probe-needle", "--q", "0"], "that is topk"),
        (["calibrate", "--model", "probe", "--task", "probe-needle", "--check", "-1"], "0 for none"),
    ):
        with pytest.raises(ValueError, match=says):
            command(*arguments)


# -- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_the_command_calibrates_a_probe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subject: Subject, per_head: bool
) -> None:
    out = tmp_path / "deep" / "policy.json"
    options = {"model": "probe", "task": "probe-scattered", "context": "2k", "budget": "6", "n": "2", "check": "1"}
    given = [f"--{key}={value}" for key, value in options.items()]
    command("calibrate", *given, "--out", str(out), *(["--per-head"] if per_head else []))
    printed = capsys.readouterr().out
    policy = closecall.Policy.from_json(out.read_text())
    trigger: Any = policy.rule.trigger  # type: ignore[attr-defined]
    n_layers = subject.loaded.model.config.num_hidden_layers
    assert trigger.layers == tuple(range(n_layers))
    assert trigger.per_head == per_head
    assert Settings.read({"closecall": {"policy": str(out)}}).policy == policy  # vLLM takes the file as it is
    for said in ("Calibrated probe", "calibration 2048", "new 2048", "one for all"):
        assert said in printed
    # On the prompts they come from, thresholds trigger ceil(0.4 T) of all T tiles that could be; here T = 2 x 20.
    lines = [line.split() for line in printed.splitlines() if line[:1].isspace() or line[:1].isdigit()]
    rates = [line[3 if per_head else 2] for line in lines if len(line) == (6 if per_head else 5)]
    assert rates == ["40.0%"] * n_layers
    from closecall_lab import tasks
    from closecall_lab.tasks import encode_example

    examples = tasks.get("probe-scattered").examples(subject.loaded.tokenizer, 2048, 3, 0, wrap=subject.loaded.prompt)
    new = encode_example(subject.loaded.tokenizer, list(examples)[2]).ids
    with torch.no_grad(), closecall.attach(subject.loaded.model, policy) as handle:
        subject.loaded.model(torch.tensor([new]))
        reached = [f"{handle.stats()[i]['trigger_rate']:.1%}" for i in range(n_layers)]
    column = [line[4 if per_head else 3] for line in lines if len(line) == (6 if per_head else 5)]
    assert column == reached


def test_without_a_task_the_command_reads_text(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    read: list[object] = []

    def calibrate(subject: Subject, task: str, *args: object, **options: object) -> None:
        read.append(task)
        raise SystemExit

    monkeypatch.setattr("closecall_lab.theory.calibrate.calibrate", calibrate)
    with pytest.raises(SystemExit):
        command("calibrate", "--model", "probe")
    assert read == ["text"]


def test_a_context_within_the_budget_cannot_be_calibrated(subject: Subject) -> None:
    from closecall_lab.theory.calibrate import calibrate

    with pytest.raises(ValueError, match="at least 4225 tokens"):
        calibrate(subject, "probe-scattered", [2048], closecall.policy("router"), log=lambda _: None)
    with pytest.raises(ValueError, match="calibrate a router"):
        calibrate(subject, "probe-scattered", [2048], closecall.policy("quest"), log=lambda _: None)
    shared = closecall.policy("router", share="group")
    with pytest.raises(ValueError, match=r"share = 'group': .* calibrate one threshold a layer"):
        calibrate(subject, "probe-scattered", [8192], shared, per_head=True, log=lambda _: None)


def test_findings_are_one_for_each_scorer(tmp_path: Path) -> None:
    assert [f.scorer for f in findings_of(known(tmp_path), samples=4)] == ["made"]


def test_rows_are_counted_at_every_level() -> None:
    share = certified.Share("made", 2, 4)
    share.add(torch.tensor([0.0, 0.005, 0.2, 0.9]), torch.tensor([0.0, 0.1, 0.6, 1.0]))
    share.add(torch.zeros(4), torch.zeros(4))
    assert [share.at(eps) for eps in (0.5, 0.1, 0.01)] == [(6 / 8, 7 / 8), (6 / 8, 6 / 8), (5 / 8, 6 / 8)]
