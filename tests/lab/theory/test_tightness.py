"""The float64 truth that reports compare certificates with, and the commands behind the documentation's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import closecall
import oracle
from closecall.certify.certificate import certify
from closecall_lab.theory.__main__ import inputs, main
from closecall_lab.theory.tightness import dropped, tightness
from compare import kept_of
from test_certify import truth


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("packed", [False, True])
def test_what_was_dropped(softcap: float, packed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, h, 150, 8, generator=generator) for h in (4, 2, 2))
    kwargs = {"cu_seqlens": torch.tensor([0, 40, 150], dtype=torch.int32)} if packed else {}
    policy = closecall.policy("topk", budget=5, tile_factor=1, block=8, tile=8)
    selection = closecall.select(q, k, policy, scale=0.7, **kwargs)
    mass, error = dropped(q, k, v, selection, scale=0.7, softcap=softcap)
    plan = oracle.tiles(1, 150, 150, 8, 8, **kwargs)
    true_mass, true_error = truth(q, k, v, kept_of(selection), plan, 0.7, softcap)
    assert np.allclose(mass.numpy(), true_mass.astype(float), rtol=1e-12, atol=1e-14)
    assert np.allclose(error.numpy(), true_error.astype(float), rtol=1e-12, atol=1e-13)
    assert float(mass.max()) > 0.1


def test_tightness_is_truth_beside_bound() -> None:
    q, k, v = inputs("sink", 512, 0)
    selection = closecall.select(q, k, closecall.policy("quest", budget=2))
    tight = tightness(q, k, v, selection)
    certificate = certify(q, k, v, selection)
    mass, error = dropped(q, k, v, selection)
    cut = certificate.mass > 0
    assert tight.mass == pytest.approx(float(mass[cut].mean()))
    assert tight.mass_bound == pytest.approx(float(certificate.mass[cut].double().mean()))
    assert tight.error == pytest.approx(float(error[cut].mean()))
    assert tight.error_bound == pytest.approx(float(certificate.error[cut].double().mean()))
    assert 0 < tight.mass <= tight.mass_bound
    assert tight.certified == certificate.certified(0.1) <= tight.certifiable


def test_the_command_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tightness", "--context", "2048"])
    printed = capsys.readouterr().out
    assert printed.count("| drifting |") == 3
