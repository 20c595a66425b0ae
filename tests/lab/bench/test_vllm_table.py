"""What of the vLLM benchmark and demo needs no vLLM: the table, the prompt, and that a server that dies is reported."""

from __future__ import annotations

import pytest

import closecall
from closecall_lab.bench import vllm_demo, vllm_server, vllm_table


def turn(attention: float) -> dict[str, float]:
    return {"attention": attention, "first": attention + 1, "cached": 0.5, "decode": 20.0}


def test_the_table_shows_medians_and_shares_of_vllms_own_attention():
    turns = {"vllm": [turn(4.0), turn(100.0), turn(2.0)], "auto:budget=8": [turn(1.0), turn(1.0), turn(9.0)]}
    lines = vllm_table.table(turns).splitlines()
    assert lines[2] == "| vLLM | 4.00 | 1.00 | 5.00 | 0.50 | 20.0 |"
    assert lines[3] == "| closecall, auto:budget=8 | 1.00 | 0.25 | 2.00 | 0.50 | 20.0 |"


def test_without_vllm_among_the_contenders_there_is_no_share():
    assert "| closecall, dense | 4.00 | - |" in vllm_table.table({"dense": [turn(4.0)]})


def test_a_saved_policy_is_called_by_its_name(tmp_path):
    saved = tmp_path / "mine.json"
    closecall.policy("router-on-quest", trigger="calibrated", thresholds=(0.1, 0.2)).save(saved)
    assert "| closecall, router-on-quest (mine.json) | 4.00 |" in vllm_table.table({str(saved): [turn(4.0)]})


def test_a_model_is_a_name_or_whatever_vllm_finds(monkeypatch):
    monkeypatch.setattr(vllm_server, "get", lambda name: f"/cache/{name}")
    assert vllm_server.model_directory("smollm2") == "/cache/smollm2"
    assert vllm_server.model_directory("some/where") == "some/where"


def test_the_demo_hides_its_needle_in_the_middle():
    text = vllm_demo.prompt(2000)
    assert 0.4 < text.index(vllm_demo.NEEDLE) / len(text) < 0.6
    assert text.endswith(vllm_demo.QUESTION)
    assert 1800 < len(text.split()) < 2200


def test_a_server_that_does_not_start_is_an_error_with_its_log():
    # Where vLLM is missing the module cannot run; where it is there, there is no such model.
    with (
        pytest.raises(RuntimeError, match="the server did not start"),
        vllm_server.serving("/no/such/model", None, patience=120.0),
    ):
        pass
