from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from closecall import __version__, backends, cli, info
from closecall.backends import cpu


def page(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["info"]) == 0
    return capsys.readouterr().out


def test_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CLOSECALL_ISA", raising=False)
    text = page(capsys)
    assert text.startswith(f"closecall {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    for name in backends.NAMES:
        assert f"\n  {name:10} " in text
    assert f"[{cpu.tiers()[0]}]" in text
    assert "the best this machine has" in text
    for dtype in info.DTYPES:
        assert f"\n  cpu   {dtype}  ->  " in text
    assert "problem" not in text


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == info.gather()
    assert facts["machine"]["cores"] >= 1
    taken = {a["dtype"]: a["name"] for a in facts["auto"] if a["device"] == "cpu"}
    assert taken["fp32"] == ("cpu" if facts["native"]["built"] else taken["fp64"])
    assert taken["fp64"] != "cpu"  # no native kernel for float64


def test_a_forced_tier_is_marked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slowest = cpu.tiers()[-1]
    monkeypatch.setenv("CLOSECALL_ISA", slowest)
    text = page(capsys)
    assert f"[{slowest}]" in text
    assert "forced by CLOSECALL_ISA" in text


def test_a_tier_this_machine_lacks_is_a_problem_it_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLOSECALL_ISA", "avx9000")
    text = page(capsys)
    assert "problem: " in text
    assert "avx9000" in text
    assert cli.main(["info", "--json"]) == 0
    native = json.loads(capsys.readouterr().out)["native"]
    assert native["tier"] is None
    assert native["forced_by_CLOSECALL_ISA"] == "avx9000"


def test_without_native_code_the_remedy_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "tiers", list)
    assert "native    not built: install a C++ compiler and reinstall closecall" in page(capsys)


def test_the_processor_has_a_name_on_systems_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert info.cpu_model() in (platform.processor(), platform.machine())
    assert info.cpu_model()
