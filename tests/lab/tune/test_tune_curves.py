"""Error curves against the operator itself."""

from __future__ import annotations

import pytest
import torch

import closecall
from closecall_lab.tune.curves import Sample, curves

EVERY_ROW = Sample(tiles=10**6, rows=64)


def drawn(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(1, 4, length, 32), torch.randn(1, 2, length, 32) * 2, torch.randn(1, 2, length, 32)


@pytest.mark.parametrize("length", [640, 700])
def test_the_curve_is_the_error_of_attention_at_each_budget(length: int) -> None:
    q, k, v = drawn(length)
    policy = closecall.policy("quest")
    measured = curves(q, k, v, policy, 32**-0.5, EVERY_ROW)
    dense = closecall.attention(q, k, v, "dense", backend="reference")
    tiles = range(3, -(-length // 64))  # the first three tiles have nothing to choose
    rows = torch.cat([torch.arange(64 * t, min(64 * t + 64, length)) for t in tiles])
    energy = dense[:, :, rows].square().sum()
    for budget in (4, 5, 8, measured.shape[1] - 1):
        fixed = closecall.policy("quest", budget=budget, tile_factor=1)
        out = closecall.attention(q, k, v, fixed, backend="reference")
        error = (out - dense)[:, :, rows].square().sum((0, 2, 3)) / energy
        assert torch.allclose(torch.from_numpy(measured[:, budget]).float(), error, atol=1e-6, rtol=1e-3)


def test_fewer_blocks_than_are_forced_count_as_these() -> None:
    measured = curves(*drawn(640), closecall.policy("quest"), 32**-0.5, EVERY_ROW)
    assert (measured[:, 0] == measured[:, 2]).all()
    assert (measured[:, -1] == 0).all()


def test_a_sample_is_of_the_whole_sequence_and_its_end() -> None:
    q, k, v = drawn(1280)
    some = curves(q, k, v, closecall.policy("quest"), 32**-0.5, Sample(tiles=4, rows=8))
    every = curves(q, k, v, closecall.policy("quest"), 32**-0.5, EVERY_ROW)
    assert some.shape == every.shape
    assert some[:, 6] == pytest.approx(every[:, 6], rel=0.5)
    geometry = closecall.select(q, k, "quest").geometry
    tiles = [t for t, _ in Sample(tiles=4).of(geometry, 1)]
    assert tiles[-1] == 19
    assert len(tiles) == 4


def test_a_text_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="no tile of 128 keys has a choice"):
        curves(*drawn(128), closecall.policy("quest"), 1.0, Sample())
