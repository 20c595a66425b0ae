"""Which launch a call gets: the table's, one that was timed on this device, or the user's; and what a refusal means.

With `CLOSECALL_AUTOTUNE=1` the first call of each kind on a device times the table's neighbours and keeps the fastest
in `launch.json`, in the directory `CLOSECALL_CACHE` or `closecall` in the user's cache directory. Calls are of one kind
if they run the same kernel on the same device, types and head dims, and are about as large: what is best for a short
prompt says little about a long one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...cache import cache_dir
from ...registry import unknown
from .launch import ARCHS, DTYPES, KERNELS, MOST_KEYS, Launch, boxes, overrides, table


@dataclass(frozen=True)
class Call:
    """What a launch is chosen for. Lengths count as the powers of two that hold them."""

    kernel: str
    arch: str
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str = ""  # its name, as the driver says it
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    rows: int = 1  # of queries
    keys: int = 1
    width: int = 0  # blocks that a tile keeps at most; 0: every block that it sees

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise unknown("kernel", self.kernel, KERNELS)
        if self.arch not in ARCHS:
            raise unknown("architecture", self.arch, ARCHS)

    @property
    def start(self) -> Launch:
        """The table's choice."""
        return table(self.kernel, self.arch, self.head_dim, self.value_dim, DTYPES[self.dtype])

    @property
    def tma(self) -> bool:
        """Whether the copy engine may bring keys and values."""
        able = self.kernel in ("attend", "packed")
        return able and boxes(self.arch, self.head_dim, self.value_dim, DTYPES[self.dtype])

    @property
    def key(self) -> str:
        def size(n: int) -> int:
            return 1 << max(n - 1, 0).bit_length()

        kept = f"kept {size(self.width)}" if self.width else "dense"
        return (
            f"{self.kernel} {self.arch} {self.device or 'any'} D{self.head_dim}/{self.value_dim} {DTYPES[self.dtype]} "
            f"B{self.batch} H{self.heads}/{self.kv_heads} M{size(self.rows)} N{size(self.keys)} {kept}"
        )


def tuning() -> bool:
    return os.environ.get("CLOSECALL_AUTOTUNE", "0") not in ("", "0")


def choose(call: Call) -> Launch:
    """The launch in use: the table's, or what was tuned on this machine, with the user's overrides."""
    chosen = call.start
    if tuning():
        chosen = _tuned().get(call.key, chosen)
    return dataclasses.replace(chosen, **overrides().get(call.kernel, {}))


def candidates(start: Launch, tma: bool = False) -> list[Launch]:
    """The table's choice, and those one step away from it in rows, keys or warps, and with up to six stages; and, where
    the copy engine can bring keys and values (`tma`), the same by it."""
    near = [start]
    for field in ("rows", "keys", "num_warps"):
        for factor in (0.5, 2):
            value: Any = int(getattr(start, field) * factor)
            if (16 if field in ("rows", "keys") else 1) <= value <= (16 if field == "num_warps" else MOST_KEYS):
                near.append(dataclasses.replace(start, **{field: value}))
    near += [dataclasses.replace(start, num_stages=n) for n in range(1, 7) if n != start.num_stages]
    return near + [dataclasses.replace(one, tma=True) for one in near if tma]


def cache_file() -> Path:
    return cache_dir() / "launch.json"


def _tuned() -> dict[str, Launch]:
    path = cache_file()
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@functools.lru_cache(maxsize=4)
def _read(path: Path, written: int) -> dict[str, Launch]:
    """A file that is not ours, or damaged, counts as empty: it is written anew."""
    try:
        return {key: Launch(**fields) for key, fields in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{path} is damaged and will be written anew: {error}", stacklevel=2)
        return {}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, where the system has such locks."""
    try:
        import fcntl
    except ImportError:  # Windows: two that write at once may lose one's entry, never the file
        yield
        return
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _keep(key: str, best: Launch) -> None:
    """Adds an entry to what the file holds by now: other processes tune too."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            known = _tuned() | {key: best}
            draft = path.with_suffix(f".{os.getpid()}")  # renamed when whole: nobody reads half a file
            draft.write_text(json.dumps({k: dataclasses.asdict(x) for k, x in known.items()}, indent=1))
            draft.replace(path)
    except OSError as error:
        warnings.warn(f"the tuned launch is not remembered in {path}: {error}", stacklevel=2)


def _bench(run: Callable[[], None]) -> float:
    """Milliseconds; infinity for a launch that the compiler or the device refuses."""
    from triton.errors import TritonError  # type: ignore[import-untyped]
    from triton.testing import do_bench  # type: ignore[import-untyped]

    try:
        return float(do_bench(run, warmup=10, rep=50, return_mode="median"))
    except TritonError:
        return math.inf


def tune(
    key: str,
    start: Launch,
    run: Callable[[Launch], None],
    bench: Callable[[Callable[[], None]], float],
    tma: bool = False,
) -> Launch:
    """The fastest candidate, remembered on disk; the table's where none runs."""
    times = {one: bench(functools.partial(run, one)) for one in candidates(start, tma)}
    best = min(times, key=lambda one: times[one])
    if times[best] == math.inf:
        return start
    _keep(key, best)
    return best


# What was tuned in this process, should the file not hold it.
_here: dict[str, Launch] = {}


def run(call: Call, start: Callable[[Launch], None]) -> None:
    """Calls `start` with the launch in use, after tuning it where that was asked for and has not happened yet."""
    chosen = choose(call)
    if tuning() and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        if call.key not in _here and call.key not in _tuned():
            _here[call.key] = tune(call.key, call.start, start, _bench, call.tma)
        chosen = dataclasses.replace(_tuned().get(call.key, _here.get(call.key, call.start)),
                                     **overrides().get(call.kernel, {}))  # fmt: skip
    try:
        start(chosen)
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # triton's, which is not imported here
            raise
        raise RuntimeError(
            f"{call.kernel} at head dim {call.head_dim}/{call.value_dim} in {DTYPES[call.dtype]} does not fit on "
            f"{call.device or 'this device'} ({call.arch}) with {chosen}: {error}. Set "
            f'CLOSECALL_LAUNCH=\'{{"{call.kernel}": {{"num_stages": 2, "keys": 16}}}}\', or use backend=\'flex\''
        ) from error
