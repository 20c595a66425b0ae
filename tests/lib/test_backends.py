"""Which backend runs, and why."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import closecall
from closecall import backends
from engines import ENGINES, has_native

X = torch.randn(1, 1, 10, 8)


def test_the_native_backend_was_built() -> None:
    """Where a build is required (CI), its absence must not pass as fewer tests."""
    assert has_native() or not os.environ.get("CLOSECALL_REQUIRE_NATIVE")
    assert {e.backend for e in ENGINES} <= set(backends.NAMES)


@pytest.mark.skipif(not has_native(), reason="the native module is not built")
def test_auto_takes_the_native_backend_for_cpu_tensors() -> None:
    choice = backends.explain(X)
    assert choice.name == "cpu"
    assert "float32" in choice.why
    assert torch.equal(closecall.attention(X, X, X, "dense"), closecall.attention(X, X, X, "dense", backend="cpu"))


def test_auto_takes_the_reference_where_nothing_else_can_and_says_why() -> None:
    choice = backends.explain(X.double())
    assert choice.name == "reference"
    assert choice.why
    backends._say_once.cache_clear()
    x = X.double()
    with pytest.warns(
        UserWarning, match="'reference', which is hundreds of times slower .*float64: use float32"
    ) as said:
        assert closecall.attention(x, x, x, "dense").dtype == torch.float64
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        closecall.attention(x, x, x, "dense")  # once is enough
        closecall.attention(x, x, x, "dense", backend="reference")  # nothing was left to us


@pytest.mark.skipif(not has_native(), reason="the native module is not built")
def test_a_backend_that_cannot_run_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"backend 'cpu' cannot run here: .*float64.*use float32"):
        closecall.attention(X.double(), X.double(), X.double(), "dense", backend="cpu")


@pytest.mark.skipif(not has_native(), reason="the native module is not built")
def test_the_tier_can_be_forced_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from closecall.backends import cpu

    monkeypatch.delenv("CLOSECALL_ISA", raising=False)
    assert cpu.tier() == cpu.tiers()[0]
    assert cpu.tiers()[-1] == "portable"
    for name in cpu.tiers():
        monkeypatch.setenv("CLOSECALL_ISA", name)
        assert cpu.tier() == name
    monkeypatch.setenv("CLOSECALL_ISA", "portabel")
    for call in (cpu.tier, lambda: closecall.attention(X, X, X, "dense", backend="cpu")):
        with pytest.raises(ValueError, match=r"CLOSECALL_ISA.*'portabel': did you mean 'portable'"):
            call()
