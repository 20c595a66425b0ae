"""A tiny model, and a capture of a few prompts of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from closecall_lab.eval.compare.capture import Capture, capture
from closecall_lab.eval.subject import Subject

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
TASKS = ("probe-needle", "probe-scattered:keys=8,questions=3")


@pytest.fixture(scope="session")
def tiny(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("Llama")


@pytest.fixture(scope="session")
def subject(tiny: Path) -> Subject:
    return Subject.open(str(tiny))


@pytest.fixture(scope="session")
def captured(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Two tasks, two prompts each: one of each part. Nobody writes into it."""
    directory = tmp_path_factory.mktemp("captured") / "tiny"
    assert capture(subject, directory, task_names=TASKS, contexts=(512,), n=2, say=lambda _: None) == 4
    return Capture.open(directory)


@pytest.fixture(autouse=True)
def _fewer_draws(fewer_draws: None) -> None:
    """Tests over up to nine contexts stay exact."""


@pytest.fixture(autouse=True, scope="session")
def one_thread_for_processes_started_here() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
