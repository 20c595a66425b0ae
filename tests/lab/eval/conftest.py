"""A tiny model, and processes that import what the tests do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TRAINED = 1024


@pytest.fixture(scope="session")
def tiny(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("Granite")


@pytest.fixture(autouse=True, scope="session")
def processes_like_this_one() -> None:
    """Processes started by tests, Ray's among them, import what the tests import, and use one thread each."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    os.environ["OMP_NUM_THREADS"] = "1"
    assert sys.executable


@pytest.fixture
def any_lm_eval_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every lm-eval task for known: reading lm-eval's own index takes twenty seconds."""
    monkeypatch.setattr("closecall_lab.eval.harness.LmEval.check", lambda self: None)
