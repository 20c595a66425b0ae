"""The statistics against tables worked out by hand, the libraries' own, and the figures the paper quotes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from closecall_lab.eval import statistics


def sparse(both: int, only_a: int, only_b: int, neither: int) -> tuple[list[int], list[int]]:
    """Answers of two policies from the four counts of their table."""
    a = [1] * both + [1] * only_a + [0] * only_b + [0] * neither
    b = [1] * both + [0] * only_a + [1] * only_b + [0] * neither
    return a, b


def test_the_papers_mcnemar_figure() -> None:
    """Router against the matched Quest on Qwen-14B: 3 against 1 discordant."""
    a, b = sparse(95, 3, 1, 1)
    assert (sum(a) / 100, sum(b) / 100) == (0.98, 0.96)
    assert statistics.discordant(a, b) == (3, 1)
    assert statistics.mcnemar(3, 1) == 0.625


def test_the_papers_other_p_values_are_possible() -> None:
    """Its differences, with as few losses as can be, reach the p-values it states; the paper gives no counts."""
    assert statistics.mcnemar(12, 0) < 0.01  # K-mean on Qwen-14B, 0.51 to 0.63 of 100
    assert statistics.mcnemar(16, 0) < 0.001  # K-max on Nemo, 0.50 to 0.66 of 100
    assert statistics.mcnemar(30 - 19, 0) < 0.01  # LongBench-v2 paired recall, 0.47 to 0.75 of 40


def test_one_sign_test_of_the_paper_cannot_be_about_the_difference_beside_it() -> None:
    """`p <= 0.004` stands beside 0.66 against 0.60 of 100. Six more wins than losses never reach that; nine do, and
    nine is the difference from the matched control."""
    best = min(statistics.sign_test(6 + losses, losses) for losses in range(35))
    assert best == 1 / 64
    assert [losses for losses in range(30) if statistics.sign_test(9 + losses, losses) <= 0.004] == [0]


@pytest.mark.parametrize(("wins", "losses"), list(itertools.product(range(7), range(7))))
def test_tests_count_the_outcomes_of_fair_coins(wins: int, losses: int) -> None:
    n = wins + losses
    ways = [math.comb(n, k) for k in range(n + 1)]
    assert statistics.sign_test(wins, losses) == pytest.approx(sum(ways[wins:]) / 2**n)
    both = sum(w for k, w in enumerate(ways) if max(k, n - k) >= max(wins, losses))
    assert statistics.mcnemar(wins, losses) == pytest.approx(both / 2**n)


def test_mcnemar_is_statsmodels() -> None:
    import statsmodels.stats.contingency_tables

    a, b = sparse(50, 17, 5, 28)
    table = statsmodels.stats.contingency_tables.mcnemar([[50, 17], [5, 28]], exact=True)
    assert statistics.mcnemar(*statistics.discordant(a, b)) == table.pvalue


def test_wilson_on_a_textbook_case() -> None:
    z, n, p = 1.959963984540054, 10, 0.9
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = statistics.wilson([1] * 9 + [0])
    assert (found.value, found.n) == (0.9, 10)
    assert found.low == pytest.approx((centre - half) / (1 + z * z / n))
    assert found.high == pytest.approx((centre + half) / (1 + z * z / n))


def test_paired_recall_counts_what_dense_answered() -> None:
    """Table 2 of the paper, top-k on Qwen-14B: 19 of the 40 that dense answers, of 215."""
    dense = [1] * 40 + [0] * 175
    questions = range(215)
    found = statistics.paired_recall(dense, [1] * 19 + [0] * 21 + [1] * 22 + [0] * 153, questions)
    assert (found.n, found.value) == (40, 19 / 40)
    assert round(found.value, 2) in (0.47, 0.48)
    assert found.low < found.value < found.high
    assert statistics.paired_recall(dense, dense, questions).value == 1
    assert math.isnan(statistics.paired_recall([0, 0], [1, 0], range(2)).value)


def test_holm_by_hand() -> None:
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([]) == []


def test_the_bootstrap_draws_contexts_whole() -> None:
    """Twenty copies of each answer in its context say no more than one; taken for twenty contexts they would."""
    answers = np.array([1, 0, 1, 1, 0, 1, 0, 1])
    once = statistics.clustered(answers, range(8))
    copied = statistics.clustered(np.repeat(answers, 20), np.repeat(np.arange(8), 20).tolist())
    independent = statistics.clustered(np.repeat(answers, 20), range(160))
    assert (copied.value, copied.low, copied.high) == (once.value, once.low, once.high)
    assert independent.high - independent.low < (once.high - once.low) / 3


def test_the_bootstrap_against_its_exact_distribution() -> None:
    """With three contexts all 27 draws can be listed; percentiles of the sampled ones are among their values."""
    sums, sizes = np.array([2.0, 1.0, 0.0]), np.array([2, 4, 3])
    means = {
        round(float(sums[list(d)].sum() / sizes[list(d)].sum()), 12) for d in itertools.product(range(3), repeat=3)
    }
    values = [1, 1, 1, 0, 0, 0, 0, 0, 0]
    found = statistics.clustered(values, [0, 0, 1, 1, 1, 1, 2, 2, 2])
    assert found.value == pytest.approx(3 / 9)
    assert round(found.low, 12) == min(means)  # each end has probability 1/27, more than 2.5%
    assert round(found.high, 12) == max(means)


def test_the_bootstrap_is_seeded() -> None:
    values, clusters = np.random.default_rng(1).random(50), np.arange(50).tolist()
    assert statistics.clustered(values, clusters, seed=3) == statistics.clustered(values, clusters, seed=3)
    assert statistics.clustered(values, clusters, seed=3) != statistics.clustered(values, clusters, seed=4)


def test_one_context_has_no_interval_and_equal_ones_a_point() -> None:
    one = statistics.clustered([1, 0], ["a", "a"])
    assert one.value == 0.5
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert str(one) == f"{one.value:.2f}"
    same = statistics.clustered([1, 1, 1], ["a", "b", "c"])
    assert (same.low, same.high) == (1, 1)


def test_the_cluster_test_is_mcnemar_where_every_question_has_its_own_context() -> None:
    a, b = sparse(5, 6, 1, 3)
    assert statistics.cluster_test(a, b, range(15)) == pytest.approx(statistics.mcnemar(6, 1))


def test_the_cluster_test_is_not_fooled_by_questions_that_share_a_context() -> None:
    a, b = [1] * 40, [0] * 20 + [1] * 20
    assert statistics.mcnemar(*statistics.discordant(a, b)) < 1e-5
    assert statistics.cluster_test(a, b, ["one"] * 20 + ["two"] * 20) == 1  # one context: two flips, both as extreme
    assert statistics.cluster_test(a, a, range(40)) == 1


@pytest.mark.parametrize("seed", range(12))
def test_flips_are_counted_exactly(seed: int) -> None:
    chance = np.random.default_rng(seed)
    n = int(chance.integers(2, 12))
    differences = chance.integers(-3, 4, n) / chance.choice([1, 5, 8]) if seed % 2 else chance.normal(size=n) * 1e-4
    total = abs(differences.sum())
    flipped = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=n)]
    p = np.mean([x >= total - 1e-12 for x in flipped])
    assert statistics.sign_flips(differences) == pytest.approx(1.0 if np.count_nonzero(differences) < 2 else p)


def test_many_contexts_reach_a_p_value_that_survives_a_large_family() -> None:
    assert statistics.sign_flips([1.0] * 40) == pytest.approx(2 * 0.5**40)
    assert statistics.sign_flips([3.0] * 300 + [-2.0] * 300) < 1e-5
    chance = np.random.default_rng(0)
    assert 0 < statistics.sign_flips(chance.normal(3, 1, 40)) < 0.001  # no two sums alike: sampled


def test_rounding_is_no_difference() -> None:
    contexts = [i for i in range(12) for _ in (0, 1)]
    assert statistics.cluster_test([0.8, 0.4] * 12, [0.6, 0.6] * 12, contexts) == 1


def test_contexts_that_score_alike_still_have_an_interval() -> None:
    found = statistics.share([1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 2, 2])
    assert (found.value, found.n) == (0.5, 6)
    assert found.low < 0.2 < 0.8 < found.high
    right = statistics.share([1] * 6, [0, 0, 1, 1, 2, 2])
    assert (right.low, right.high) == (statistics.wilson([1] * 3).low, 1)
    one = statistics.share([1, 0], [0, 0])
    assert math.isnan(one.low)


def test_wilson_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for hits, n in ((0, 1), (1, 1), (3, 7), (0, 30), (30, 30), (17, 40)):
        other = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
        found = statistics.wilson([1] * hits + [0] * (n - hits))
        assert (found.low, found.high) == pytest.approx((other.low, other.high))


def test_comparisons_are_one_family() -> None:
    rng = np.random.default_rng(0)
    answers = {name: (rng.random(60) < p).astype(int) for name, p in (("a", 0.9), ("b", 0.6), ("c", 0.5))}
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    comparisons = statistics.compare(answers, pairs, range(60))
    assert [(c.a, c.b) for c in comparisons] == pairs
    for c in comparisons:
        assert c.wins - c.losses == int(answers[c.a].sum() - answers[c.b].sum())
        assert c.difference.value == pytest.approx((c.wins - c.losses) / 60)
        assert c.mcnemar == statistics.mcnemar(c.wins, c.losses)
        assert c.sign == statistics.sign_test(c.wins, c.losses)
    for test in ("mcnemar", "sign", "cluster"):
        assert [getattr(c, f"{test}_holm") for c in comparisons] == statistics.holm(
            [getattr(c, test) for c in comparisons]
        )


def test_scores_carry_the_difference_where_they_are_shares_of_a_point() -> None:
    answers, scores = {"a": [1, 0], "b": [0, 0]}, {"a": [1.0, 0.5], "b": [0.5, 0.25]}
    found = statistics.compare(answers, [("a", "b")], [0, 1], scores=scores)[0]
    assert found.difference.value == pytest.approx(0.375)
    assert (found.wins, found.losses) == (1, 0)


def test_the_decomposition_of_the_papers_nemo_column() -> None:
    """0.66 against 0.51 of 100, matched control 0.57: +15 points are +6 for the budget and +9 for the choice."""
    router, topk, matched = ([1] * k + [0] * (100 - k) for k in (66, 51, 57))
    split = statistics.decompose(router, topk, matched, range(100))
    values = [round(x.value, 10) for x in (split.lift, split.budget, split.selectivity)]
    assert values == [0.15, 0.06, 0.09]
    assert split.lift.value == pytest.approx(split.budget.value + split.selectivity.value)
    assert split.lift.low < 0.15 < split.lift.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.wilson([]), "at least one number"),
        (lambda: statistics.wilson([0.5]), "correct or not"),
        (lambda: statistics.paired_recall([1, 0], [1], range(2)), "same questions, got 2 and 1"),
        (lambda: statistics.mcnemar(-1, 2), "cannot be negative, got -1 and 2"),
        (lambda: statistics.clustered([1, 0], ["a"]), "2 values and 1 clusters"),
        (lambda: statistics.cluster_test([1], [1, 0], [1]), "got 1 and 2"),
        (lambda: statistics.decompose([1], [1], [1, 0], [1]), "got 1, 1 and 2"),
    ],
)
def test_errors(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
