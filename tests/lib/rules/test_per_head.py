"""Budgets by layer and head."""

from __future__ import annotations

import pytest
import torch

import closecall
from closecall.ranking import Ranked
from closecall.rules.last_tile import LastTile
from closecall.rules.per_head import PerHead


def tuned(*budgets: tuple[int, ...], layers: tuple[int, ...] = ()) -> closecall.Policy:
    return closecall.policy("quest").replace(rule=PerHead(budgets, layers))


def drawn(heads: int = 4, kv_heads: int = 2, length: int = 1100) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, heads, length, 32), torch.randn(1, kv_heads, length, 32), torch.randn(1, kv_heads, length, 32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_each_head_keeps_what_topk_of_its_budget_would(backend: str) -> None:
    q, k, _ = drawn()
    budgets = (5, 9, 4, 17)
    kept = closecall.select(q, k, tuned(budgets), backend=backend)
    for head, budget in enumerate(budgets):
        alone = closecall.select(q, k, closecall.policy("quest", budget=budget, tile_factor=1), backend=backend)
        assert torch.equal(kept.counts[:, head], alone.counts[:, head])
        assert torch.equal(kept.kept_mask()[:, head], alone.kept_mask()[:, head])
        assert torch.equal(kept.margin[:, head].nan_to_num(-1), alone.margin[:, head].nan_to_num(-1))


def test_equal_budgets_are_top_k_and_large_ones_dense() -> None:
    q, k, v = drawn()
    same = closecall.attention(q, k, v, tuned((8,) * 4))
    assert torch.equal(same, closecall.attention(q, k, v, closecall.policy("quest", budget=4)))
    assert torch.equal(closecall.attention(q, k, v, tuned((18,) * 4)), closecall.attention(q, k, v, "dense"))


def test_heads_of_other_ranks_have_their_own_budgets() -> None:
    """A rank that holds heads 2 and 3 of four takes the third and fourth budget."""
    q, k, _ = drawn()
    policy = tuned((5, 9, 4, 17))
    whole = closecall.select(q, k, policy)

    def gathered(local: torch.Tensor) -> tuple[torch.Tensor, slice]:
        return torch.cat([local, local], 1), slice(2, 4)

    order = torch.zeros(1, 2, whole.counts.shape[2], 17, dtype=torch.int32)
    visible, forced = whole.geometry.visible, whole.geometry.forced(1)
    ranked = Ranked(order, torch.zeros(order.shape), visible, forced, whole.geometry.sequence, gathered)
    assert torch.equal(policy.rule.decide(ranked).counts, whole.counts[:, 2:].long())


def test_multiples_are_rounded_and_never_below_what_a_tile_needs() -> None:
    policy = tuned((5, 9), (7, 4), layers=(3, 8))
    assert policy.times(1.5).rule == PerHead(((8, 14), (10, 6)), (3, 8))
    assert policy.most_forced == 3
    assert policy.times(0.1).rule == PerHead(((4, 4), (4, 4)), (3, 8))
    q, k, _ = drawn(heads=2, kv_heads=1)
    kept = closecall.select(q, k, policy.times(2).for_layer(3))
    alone = closecall.select(q, k, tuned((10, 18)))
    assert torch.equal(kept.counts, alone.counts)


def test_a_layer_takes_its_own_and_json_brings_all_back() -> None:
    policy = tuned((5, 9), (7, 4), layers=(3, 8))
    assert policy.for_layer(8).rule == PerHead(((7, 4),), (8,))
    assert closecall.Policy.from_json(policy.to_json()) == policy
    assert policy.rule.made_for() == (3, 8)
    assert "6.25 blocks a tile on average, 4 to 9 by head" in str(policy)


def test_the_last_tile_is_protected_on_top() -> None:
    q, k, _ = drawn()
    rule = LastTile(PerHead(((6, 9, 6, 8),)), factor="dense", pay=False)
    kept = closecall.select(q, k, closecall.policy("quest").replace(rule=rule))
    assert (kept.counts[0, :, -1] == kept.n_blocks).all()
    assert kept.counts[0, :, -2].tolist() == [6, 9, 6, 8]


@pytest.mark.parametrize(
    ("budgets", "layers", "message"),
    [
        ((), (), "needs budgets"),
        (((5, 9), (5,)), (), "as many budgets"),
        (((5, 0),), (), "whole numbers of blocks"),
        (((5, 2.5),), (), "whole numbers of blocks"),
        (((5, 9),), (1, 2), "one for each of the 1"),
    ],
)
def test_bad_budgets(budgets: tuple[tuple[int, ...], ...], layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PerHead(budgets, layers)


def test_another_model_is_refused_with_both_numbers() -> None:
    q, k, _ = drawn()
    with pytest.raises(ValueError, match=r"tuned for 2 query heads, and layer 0 has 4"):
        closecall.select(q, k, tuned((5, 9)))
    with pytest.raises(ValueError, match=r"tuned for 2 layers"):
        closecall.select(q, k, tuned((5,) * 4, (9,) * 4))
    with pytest.raises(ValueError, match=r"tuned for layers 0, and this is layer 7"):
        tuned((5, 9)).for_layer(7)


def test_heads_of_another_size_are_refused_with_both_sizes() -> None:
    q, k, _ = drawn()
    fitted = closecall.policy("quest").replace(rule=PerHead(((5,) * 4,), head_dim=64))
    with pytest.raises(ValueError, match=r"tuned for 4 query heads of dimension 64, and layer 0 has 4 .* dimension 32"):
        closecall.select(q, k, fitted)
    with pytest.raises(ValueError, match="head_dim must be a whole number"):
        PerHead(((5,),), head_dim=-1)
    assert fitted.for_layer(0).rule.heads() == (4, 64)


def test_budgets_below_the_forced_blocks_are_refused() -> None:
    q, k, _ = drawn()
    with pytest.raises(ValueError, match="forced blocks"):
        closecall.select(q, k, tuned((2, 9, 9, 9)))
