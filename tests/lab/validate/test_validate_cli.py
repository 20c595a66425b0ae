from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from closecall import cli
from closecall_lab.bench.validate import runner
from closecall_lab.bench.validate.behaviour import EVERYTHING
from closecall_lab.bench.validate.cli import add_validate
from closecall_lab.bench.validate.device import Cpu
from closecall_lab.bench.validate.speed import CONTENDERS


def main(*argv: str) -> int:
    """The command alone, however the whole command line is wired."""
    parser = cli.Parser(prog="closecall")
    add_validate(parser.add_subparsers())
    return cli.guarded(parser, ["validate", *argv])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def note(*args: Any, **_: Any) -> bool:
        found.append(args)
        return True

    monkeypatch.setattr(runner, "run", note)
    return found


def test_what_is_asked_for(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    assert main("--out", str(tmp_path)) == 0
    device, backend, cases, settings, out = asked[0]
    assert (type(device), backend, cases, out) == (Cpu, "auto", EVERYTHING, tmp_path)
    assert settings.contexts == (8192, 16384, 32768)
    assert settings.contenders == CONTENDERS
    assert settings.inputs == ("gaussian", "clustered")
    assert main("--quick", "--case", "packed", "--heads", "8", "--backend", "flex", "--contexts", "1k,3000") == 0
    _, backend, cases, settings, _ = asked[1]
    assert (backend, [c.name for c in cases]) == ("flex", ["packed"])
    assert (settings.heads, settings.dim, settings.contexts) == (8, 64, (1024, 3000))
    assert "flex" not in settings.contenders
    assert settings.inputs == ("gaussian",)
    assert main("--no-timing") == 0
    assert asked[2][3] is None
    assert main("--quick", "--contenders", "dense,flex") == 0
    assert asked[3][3].contenders == ("dense", "flex")


def test_code_1_if_anything_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", lambda *_, **__: False)
    with pytest.raises(SystemExit) as ended:
        main("--device", "cpu")
    assert ended.value.code == 1


def test_the_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--list") == 0
    assert capsys.readouterr().out.splitlines() == [case.name for case in EVERYTHING]


WRONG = {
    "--device cuda": "--device cuda is not there",
    "--device gpu": "unknown --device 'gpu': did you mean 'cpu'? known: cpu, cuda",
    "--case decod": "did you mean",
    "--contexts 4kb": "--contexts takes whole numbers from 1 up, like 128 or 32k, got '4kb'",
    "--heads 3 --kv-heads 2": "--heads 3 is not a multiple of --kv-heads 2",
    "--dtype bf61": "did you mean 'bf16'?",
    "--contenders topkk": "did you mean 'topk'?",
    "--inputs clusterd": "did you mean 'clustered'?",
    "--seconds 0": "--seconds must be above 0, got 0.0",
    "--budget 0": "--budget takes whole numbers",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_options_are_explained_in_a_line(
    line: str, asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*line.split()) == 2
    said = capsys.readouterr().err
    assert WRONG[line] in said
    assert said.count("\n") == 1
    assert not asked


def test_an_unknown_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--device", "cpu", "--backend", "trition", "--out", str(tmp_path)) == 2
    assert "unknown backend 'trition'" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main("--help")
    assert ended.value.code == 0
    assert "usage: closecall validate" in capsys.readouterr().out
