"""vLLM's line of a validation. The engine itself runs in tests/vllm."""

from __future__ import annotations

import re
import subprocess
from types import SimpleNamespace

import pytest

from closecall_lab.bench.validate import device, engine, runner

RIGHT = {
    "vllm": ([5, 6], -1.0), "dense": ([5, 6], -1.04), "dense cached": ([5, 7], -1.05),
    "auto:budget=8": ([9, 1], -2.0), "auto:budget=8 cached": ([9, 1], -2.0),
}  # fmt: skip


def test_rounding_is_no_problem():
    facts = engine.compare(RIGHT, 0.1)
    assert facts["problem"] is None
    assert facts["dense_off"] == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("run", "answer", "said"),
    [
        ("dense", ([5, 6], -1.2), "dense: the first token's log-probability is 0.2 off"),
        ("dense", ([5, 6], float("nan")), "dense: the first token's log-probability is nan off"),
        ("auto:budget=8 cached", ([3, 1], -2.0), r"auto:budget=8: cold 9 \(-2\), cached 3"),
        ("auto:budget=8 cached", ([9, 1], -2.5), "cached 9"),
    ],
)
def test_what_is_wrong_is_named(run, answer, said):
    facts = engine.compare(RIGHT | {run: answer}, 0.1)
    assert re.search(said, facts["problem"])


@pytest.mark.parametrize(
    ("done", "facts"),
    [
        (("noise\n" + engine.MARK + '{"problem": null}\n', "", 0), {"problem": None}),
        (("", "Traceback\nRefusedError: no\n", 1), {"problem": "the engine ended with code 1: RefusedError: no"}),
        (("", "", -9), {"problem": "the engine ended with code -9: it said nothing"}),
    ],
)
def test_the_process_is_read(monkeypatch, done, facts):
    def run(call, **options):
        assert call[-3:] == ["some/model", "1", "4000"]
        assert options["env"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        return SimpleNamespace(stdout=done[0], stderr=done[1], returncode=done[2])

    monkeypatch.setattr(subprocess, "run", run)
    assert engine.check("some/model", gpu=True) == facts


def test_without_vllm_nothing_is_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--vllm needs vLLM, which is not installed"):
        runner.run(device.pick("cpu"), "cpu", [], None, tmp_path, vllm_model="some/model")
