from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from closecall import __version__, cli, info
from closecall_lab.bench import cli as arguments

OWN = ("info", "models", "get")
COMMANDS = (*OWN, *cli.LAB)
BENCHMARKS = ("attention", "decode", "decode-select", "growth", "prefill")
RUN = [sys.executable, "-c", "import sys; from closecall.cli import main; sys.exit(main())"]


def listed(page: str) -> list[str]:
    """The first words of lines that are indented like argparse's list of commands."""
    return [line.split()[0] for line in page.splitlines() if line.startswith("    ") and line[4:5].strip()]


def first_page(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What it prints where nothing is wrong; --help and --version end the program by themselves."""
    with contextlib.suppress(SystemExit):
        cli.main(argv)
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_the_first_page_lists_every_command_in_order(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = first_page(capsys, *argv)
    assert listed(page)[: len(COMMANDS)] == list(COMMANDS)
    assert max(map(len, page.splitlines())) <= 120


def start_here(page: str) -> list[str]:
    """What the first page tells to type."""
    lines = page[page.index("start here:") : page.index("in Python:")].splitlines()[1:]
    return [line.strip().partition("  ")[0] for line in lines if line.strip()]


def test_every_line_to_start_with_parses(capsys: pytest.CaptureFixture[str]) -> None:
    lines = start_here(first_page(capsys))
    assert len(lines) > 8
    for line in lines:
        program, *argv = line.split()
        assert program == "closecall"
        if argv[-1] == "--help":
            assert f"usage: closecall {argv[0]}" in first_page(capsys, *argv)
        else:
            assert cli.parser().parse_args(argv).run


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if closecall were installed alone."""
    monkeypatch.setattr(cli, "entry_points", lambda group: [])


@pytest.mark.usefixtures("no_lab")
def test_without_the_lab(capsys: pytest.CaptureFixture[str]) -> None:
    page = first_page(capsys)
    assert listed(page)[: len(OWN)] == list(OWN)
    assert not set(cli.LAB) & set(listed(page))
    assert "pip install ./lab" in page
    assert "bench prefill" not in page
    for command in cli.LAB:
        assert cli.main([command, "--whatever"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"closecall: `closecall {command}` is a command of the lab")
        assert said.endswith("which is not installed: pip install ./lab, in a checkout of closecall\n")
    assert cli.main(["inof"]) == 2
    assert "did you mean 'info'?" in capsys.readouterr().err


def test_the_labs_commands_are_known_here() -> None:
    """So that one of them can be named before it is installed."""
    commands: Any = cli.parser()._subparsers
    assert set(cli.LAB) <= set(commands._group_actions[0].choices)


def test_bench_alone_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert listed(capsys.readouterr().out) == list(BENCHMARKS) == list(arguments.found())


@pytest.mark.parametrize("command", [*([c] for c in COMMANDS), *(["bench", b] for b in BENCHMARKS)], ids=" ".join)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert f"usage: closecall {' '.join(command)}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_page(capsys, "--version") == f"closecall {__version__}\n"


WRONG = {
    "inof": "did you mean 'info'?",
    "bench atention": "did you mean 'attention'?",
    "info --jsn": "unrecognized arguments: --jsn (see `closecall --help`)",
    "get smolm2": "did you mean 'smollm2'?",
    "models qwen2.5-14": "did you mean 'qwen2.5-14b",
    "bench attention --contexts 4kb": "--contexts takes whole numbers from 1 up, like 128 or 32k, got '4kb'",
    "bench attention --contexts 0": "--contexts takes whole numbers from 1 up, like 128 or 32k, got '0'",
    "bench attention --policies toppk": "did you mean 'topk'?",
    "bench attention --policies dense": "--policies names none that cuts: 'dense'",
    "bench attention --baselines spda": "did you mean 'sdpa'?",
    "bench attention --budget 0": "--budget takes whole numbers from 1 up, like 128 or 32k, got '0'",
    "bench attention --heads 3 --kv-heads 2": "--heads 3 is not a multiple of --kv-heads 2",
    "bench decode --dtypes fp33": "did you mean 'fp32'?",
    "bench decode --seconds 0": "--seconds must be above 0, got 0.0",
    "bench decode --seconds soon": "invalid float value: 'soon'",
    "bench decode --threads some": "--threads takes whole numbers from 1 up, like 128 or 32k, got 'some'",
    "bench decode --isa avx3": "unknown --isa 'avx3'",
    "bench prefill": "--model is missing",
    "bench prefill --model smolm2": "did you mean 'smollm2'?",
    "bench prefill --model smollm2 --dtype bf61": "did you mean 'bf16'?",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_was_typed_wrong_is_said_in_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("closecall: ")
    assert said.err.count("\n") == 1
    assert WRONG[line] in said.err
    assert not list(tmp_path.iterdir())


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--js"]) == 2
    assert "--js" in capsys.readouterr().err


def test_what_is_not_there_is_another_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert cli.main(["bench", "prefill", "--model", nowhere, "--out", str(tmp_path)]) == 1
    assert f"closecall: no such directory: {nowhere}" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "gather", interrupted)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "closecall: interrupted\n"


def test_a_bug_is_not_passed_off_as_a_typing_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(info, "gather", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["info"])


def test_a_reader_who_had_enough() -> None:
    process = subprocess.Popen([*RUN, "models", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert said == ""


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    names = [entry["name"] for entry in json.loads(capsys.readouterr().out)]
    assert "smollm2" in names
    assert cli.main(["models", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trained_context"] == 8192


def test_help_lists_every_command_and_imports_neither_torch_nor_what_else_is_heavy() -> None:
    heavy = ("torch", "numpy", "transformers", "matplotlib", "triton", "ray", "vllm")
    code = f"import sys, closecall.cli as c; c.parser().format_help(); print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout == "[]\n"
    listed = {line.split()[0] for line in cli.parser().format_help().splitlines() if line.startswith("    ")}
    assert {"info", "models", "get", *cli.LAB, "tune"} <= listed
