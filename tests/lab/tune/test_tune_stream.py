"""How much of the residual stream attention is, and what that does to budgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

import closecall
from closecall.hf.layers import find_layers
from closecall.rules.last_tile import LastTile
from closecall.rules.per_head import PerHead
from closecall_lab.tune.fit import Fit
from closecall_lab.tune.stream import watched, weights

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50}  # fmt: skip


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), Gemma3TextConfig(**SIZES, layer_types=["full_attention"] * 2)]
)
def test_the_share_is_what_attention_adds_to_the_stream(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    block, into, before_mlp = model.model.layers[1], [], []
    normed = getattr(block, "pre_feedforward_layernorm", None) or block.post_attention_layernorm
    hooks = [
        block.register_forward_pre_hook(lambda _, args, kwargs: into.append(args[0]), with_kwargs=True),
        normed.register_forward_pre_hook(lambda _, args: before_mlp.append(args[0])),
    ]
    with torch.no_grad(), watched(model, find_layers(model)) as shares:
        model(torch.arange(1, 20)[None])
    for hook in hooks:
        hook.remove()
    added = (before_mlp[0] - into[0]).square().sum(-1) / before_mlp[0].square().sum(-1)
    assert shares[1] == pytest.approx(float(added.mean()), rel=1e-4)
    assert set(shares) == {0, 1}
    assert not block._forward_pre_hooks
    assert not block.self_attn._forward_hooks


def test_an_error_reaches_its_own_row_and_those_that_read_it_later() -> None:
    shares = {0: 0.5, 1: 0.1, 2: 0.2}
    assert weights(shares, own=True) == pytest.approx({0: 0.5 * 1.3, 1: 0.1 * 1.2, 2: 0.2})
    assert weights(shares, own=False) == pytest.approx({0: 0.5 * 0.3, 1: 0.1 * 0.2, 2: 0})


def test_tiles_that_read_everything_come_out_of_the_mean_and_nobody_pays_twice() -> None:
    steps = np.linspace(1, 0, 65) ** 6
    fitted = Fit((0, 1), np.stack([np.stack([steps] * 2), np.stack([steps / 8] * 2)]), floor=0)
    tuned = fitted.policy(closecall.policy("auto"), 8)
    assert isinstance(tuned.rule, LastTile)
    assert isinstance(tuned.rule.rule, PerHead)
    budgets = tuned.rule.rule.budgets
    assert budgets[1] == (4, 4)
    assert 0 <= budgets[0][0] - budgets[0][1] <= 1
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 4096, 16), torch.randn(1, 1, 4096, 16)
    even = closecall.select(q, k, closecall.policy("auto", budget=4)).counts.sum()
    counts = torch.stack([closecall.select(q, k, tuned.for_layer(layer)).counts for layer in (0, 1)])
    assert (counts[..., -1] == 64).all()
    assert counts[:, 0, :, -2].tolist() == [list(row) for row in budgets]
    assert 0 <= 2 * even - counts.sum() < 64  # as many blocks as for every head alike, but for less than one's


def test_a_budget_that_the_last_tiles_eat_up_is_refused() -> None:
    fitted = Fit((0,), np.linspace(1, 0, 65)[None, None])
    with pytest.raises(ValueError, match=r"a mean tile budget of 4 leaves 2\.\d+ blocks .* use a larger budget"):
        fitted.policy(closecall.policy("auto"), 4)
