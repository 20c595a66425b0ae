"""Launch choices: the table, overrides, and tuning with a stopwatch of our own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from closecall.backends.triton import launch
from closecall.backends.triton.launch import Launch

DIMS = (64, 96, 128, 192, 256)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CLOSECALL_LAUNCH", "CLOSECALL_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path))


@pytest.mark.parametrize("arch", launch.ARCHS)
@pytest.mark.parametrize("kernel", launch.KERNELS)
def test_every_kernel_has_a_choice_everywhere(kernel: str, arch: str) -> None:
    for dim in range(1, launch.LARGEST_DIM + 1):
        for dtype in launch.DTYPES:
            chosen = launch.choose(kernel, arch, dim, dim, dtype)
            assert chosen == launch.table(kernel, arch, dim, dim, launch.DTYPES[dtype])
            assert chosen.rows <= 64
            assert chosen.keys <= 64


@pytest.mark.parametrize("dim", range(1, launch.LARGEST_DIM + 1))
def test_slices_cover_the_head_dim(dim: int) -> None:
    head, tail = launch.slices(dim)
    assert head + tail >= dim
    assert {n for n in (head, tail) if n} <= {16, 32, 64, 128, 256}
    assert head > tail
    assert tail == 0 or head + tail == dim  # only the padded ones need a mask
    if dim in DIMS:
        assert head + tail == dim
    for dtype in launch.DTYPES.values():
        for arch in launch.ARCHS:
            step = launch.step(arch, dim, dtype)
            assert step == 0 or (dim % step == 0 and step >= 16)


def test_override(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launch.choose("attend", "sm_90", 128, 128, torch.bfloat16)
    monkeypatch.setenv("CLOSECALL_LAUNCH", '{"attend": {"num_warps": 16, "keys": 16}}')
    assert launch.choose("attend", "sm_90", 128, 128, torch.bfloat16) == dataclasses.replace(
        before, num_warps=16, keys=16
    )
    assert launch.choose("few", "sm_90", 128, 128, torch.bfloat16) == launch.table("few", "sm_90", 128, 128, "bf16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("warps=8", "CLOSECALL_LAUNCH is not JSON"),
        ("[1]", "object of objects"),
        ('{"attend": 8}', "object of objects"),
        ('{"atend": {}}', "unknown kernel in CLOSECALL_LAUNCH 'atend': did you mean 'attend'"),
        ('{"attend": {"warps": 8}}', "unknown launch field in CLOSECALL_LAUNCH 'warps': did you mean 'num_warps'"),
        ('{"attend": {"num_warps": 3}}', "num_warps must be a power of two, at least 1, got 3"),
        ('{"attend": {"rows": 8}}', "rows must be a power of two, at least 16, got 8"),
        ('{"attend": {"num_stages": 0}}', "num_stages must be at least 1, got 0"),
        ('{"attend": {"num_stages": true}}', "num_stages must be at least 1, got True"),
    ],
)
def test_a_bad_override(monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.setenv("CLOSECALL_LAUNCH", text)
    with pytest.raises(ValueError) as error:  # noqa: PT011  # what it says is compared next
        launch.choose("attend", "sm_90", 128, 128, torch.bfloat16)
    assert says in str(error.value)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel 'attent': did you mean 'attend'\?"):
        launch.choose("attent", "sm_90", 128, 128, torch.bfloat16)
    with pytest.raises(ValueError, match=r"unknown architecture 'sm_91': did you mean 'sm_90'\?"):
        launch.choose("attend", "sm_91", 128, 128, torch.bfloat16)


# --- Tuning ----------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Prefers eight warps and refuses rows of 128."""

    def __init__(self) -> None:
        self.ran: list[Launch] = []

    def call(self, one: Launch) -> None:
        self.ran.append(one)

    def bench(self, call: Callable[[], None]) -> float:
        call()
        one = self.ran[-1]
        return math.inf if one.rows == 128 else abs(one.num_warps - 8) + one.num_stages / 10


KEY = "attend sm_90 D128/128 bf16"


def test_tuning_keeps_the_fastest_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    watch = Stopwatch()
    best = launch.tune(KEY, start, watch.call, watch.bench)
    assert best == dataclasses.replace(start, num_warps=8)
    assert sorted(map(str, watch.ran)) == sorted(map(str, launch.candidates(start)))
    assert json.loads(launch.cache_file().read_text())[KEY] == dataclasses.asdict(best)
    assert launch.choose("attend", "sm_90", 128, 128, torch.bfloat16) == start  # nobody asked for tuned launches
    monkeypatch.setenv("CLOSECALL_AUTOTUNE", "1")
    assert launch.choose("attend", "sm_90", 128, 128, torch.bfloat16) == best
    monkeypatch.setenv("CLOSECALL_LAUNCH", '{"attend": {"num_warps": 2}}')  # the user has the last word
    assert launch.choose("attend", "sm_90", 128, 128, torch.bfloat16).num_warps == 2


def test_tuning_adds_to_what_is_there() -> None:
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    for key in (KEY, "few sm_90 D128/128 bf16"):
        watch = Stopwatch()
        launch.tune(key, start, watch.call, watch.bench)
    assert sorted(json.loads(launch.cache_file().read_text())) == [KEY, "few sm_90 D128/128 bf16"]
    assert [p.name for p in launch.cache_file().parent.iterdir()] == ["launch.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"rows": 3}}'])
def test_a_broken_file_counts_as_empty(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    launch.cache_file().write_text(text)
    monkeypatch.setenv("CLOSECALL_AUTOTUNE", "1")
    assert launch.choose("attend", "sm_90", 128, 128, torch.bfloat16) == launch.table(
        "attend", "sm_90", 128, 128, "bf16"
    )


@pytest.mark.parametrize("there", [True, False])
def test_a_call_is_tuned_once_and_only_on_a_device(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    watch = Stopwatch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(launch, "_bench", watch.bench)
    monkeypatch.setenv("CLOSECALL_AUTOTUNE", "1")
    launch.run("attend", "sm_90", 128, 128, torch.bfloat16, watch.call)
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    assert len(watch.ran) == (len(launch.candidates(start)) + 1 if there else 1)
    assert watch.ran[-1] == (dataclasses.replace(start, num_warps=8) if there else start)
    before = len(watch.ran)
    launch.run("attend", "sm_90", 128, 128, torch.bfloat16, watch.call)
    assert len(watch.ran) == before + 1


@pytest.mark.parametrize("arch", launch.ARCHS)
def test_candidates_are_launches_near_the_first(arch: str) -> None:
    for dim in DIMS:
        start = launch.table("attend", arch, dim, dim, "bf16")
        found = launch.candidates(start)
        assert found[0] == start
        assert len(set(found)) == len(found)
        for one in found[1:]:
            assert sum(getattr(one, f.name) != getattr(start, f.name) for f in dataclasses.fields(Launch)) == 1


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CLOSECALL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert launch.cache_file() == tmp_path / "caches" / "closecall" / "launch.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert launch.cache_file() == tmp_path / ".cache" / "closecall" / "launch.json"
