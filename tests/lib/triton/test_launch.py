"""Launch choices: the table, overrides, and tuning with a stopwatch of our own."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from closecall.backends.triton import launch, tuning
from closecall.backends.triton.launch import Launch
from closecall.backends.triton.tuning import Call

DIMS = (64, 96, 128, 192, 256)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CLOSECALL_LAUNCH", "CLOSECALL_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "_here", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_tuned_launches_lie_where_everything_else_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuning.cache_file() == tmp_path / "launch.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CLOSECALL_CACHE", "")
    assert tuning.cache_file() == tmp_path / "xdg" / "closecall" / "launch.json"


@pytest.mark.parametrize("arch", launch.ARCHS)
@pytest.mark.parametrize("kernel", launch.KERNELS)
def test_every_kernel_has_a_choice_everywhere(kernel: str, arch: str) -> None:
    for dim in range(1, launch.LARGEST_DIM + 1):
        for dtype in launch.DTYPES:
            chosen = tuning.choose(Call(kernel, arch, dim, dim, dtype))
            assert chosen == launch.table(kernel, arch, dim, dim, launch.DTYPES[dtype])
            assert chosen.rows <= (128 if kernel == "packed" else 64)
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


@pytest.mark.parametrize("dim", range(1, launch.LARGEST_DIM + 1))
def test_value_slices_cover_the_value_dim(dim: int) -> None:
    for arch in launch.ARCHS:
        for rows in (16, 32, 64, 128):
            part, parts, tail = launch.value_slices(arch, dim, rows)
            assert part * parts + tail == sum(launch.slices(dim))
            assert part in (16, 32, 64, 128, 256)
            assert parts >= 1
            assert tail in (0, 16, 32, 64)
            assert tail < part
            if rows >= 64 and arch in ("sm_80", *launch.SMALL):
                assert part <= rows


def test_override(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tuning.choose(Call("attend", "sm_90", 128, 128, torch.bfloat16))
    monkeypatch.setenv("CLOSECALL_LAUNCH", '{"attend": {"num_warps": 16, "keys": 16}}')
    assert tuning.choose(Call("attend", "sm_90", 128, 128, torch.bfloat16)) == dataclasses.replace(
        before, num_warps=16, keys=16
    )
    assert tuning.choose(Call("few", "sm_90", 128, 128, torch.bfloat16)) == launch.table(
        "few", "sm_90", 128, 128, "bf16"
    )


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
        tuning.choose(Call("attend", "sm_90", 128, 128, torch.bfloat16))
    assert says in str(error.value)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"unknown kernel 'attent': did you mean 'attend'\?"):
        tuning.choose(Call("attent", "sm_90", 128, 128, torch.bfloat16))
    with pytest.raises(ValueError, match=r"unknown architecture 'sm_91': did you mean 'sm_90'\?"):
        tuning.choose(Call("attend", "sm_91", 128, 128, torch.bfloat16))


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


KEY = Call("attend", "sm_90", 128, 128, torch.bfloat16).key
OTHER = Call("few", "sm_90", 128, 128, torch.bfloat16).key


def test_tuning_keeps_the_fastest_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    watch = Stopwatch()
    best = tuning.tune(KEY, start, watch.call, watch.bench)
    assert best == dataclasses.replace(start, num_warps=8)
    assert sorted(map(str, watch.ran)) == sorted(map(str, tuning.candidates(start)))
    assert json.loads(tuning.cache_file().read_text())[KEY] == dataclasses.asdict(best)
    assert tuning.choose(Call("attend", "sm_90", 128, 128, torch.bfloat16)) == start  # nobody asked for tuned launches
    monkeypatch.setenv("CLOSECALL_AUTOTUNE", "1")
    assert tuning.choose(Call("attend", "sm_90", 128, 128, torch.bfloat16)) == best
    monkeypatch.setenv("CLOSECALL_LAUNCH", '{"attend": {"num_warps": 2}}')  # the user has the last word
    assert tuning.choose(Call("attend", "sm_90", 128, 128, torch.bfloat16)).num_warps == 2


def test_tuning_adds_to_what_is_there() -> None:
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    for key in (KEY, OTHER):
        watch = Stopwatch()
        tuning.tune(key, start, watch.call, watch.bench)
    assert sorted(json.loads(tuning.cache_file().read_text())) == [KEY, OTHER]
    assert sorted(p.name for p in tuning.cache_file().parent.iterdir()) == ["launch.json", "launch.lock"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"rows": 3}}'])
def test_a_broken_file_counts_as_empty(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tuning.cache_file().write_text(text)
    monkeypatch.setenv("CLOSECALL_AUTOTUNE", "1")
    tuning._read.cache_clear()
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    with pytest.warns(UserWarning, match=r"launch\.json is damaged and will be written anew"):
        assert tuning.choose(Call("attend", "sm_90", 128, 128, torch.bfloat16)) == start
    watch = Stopwatch()
    tuning.tune(KEY, start, watch.call, watch.bench)
    assert list(json.loads(tuning.cache_file().read_text())) == [KEY]


SIZES = {"batch": 1, "heads": 28, "kv_heads": 4, "rows": 131_072, "keys": 131_072, "width": 132, "device": "A100"}


@pytest.mark.parametrize(
    "change",
    [{"rows": 512}, {"keys": 262_144}, {"heads": 32}, {"kv_heads": 28}, {"width": 0}, {"width": 16}, {"batch": 2},
     {"device": "RTX 4090"}],
)  # fmt: skip
def test_calls_of_another_kind_are_tuned_apart(change: dict[str, Any]) -> None:
    """A small first call once decided how 128K tokens were launched, and two devices shared an entry."""
    kind = ("attend", "sm_80", 128, 128, torch.bfloat16)
    assert Call(*kind, **SIZES).key != Call(*kind, **(SIZES | change)).key


def test_calls_about_as_large_share_an_entry() -> None:
    kind = ("attend", "sm_80", 128, 128, torch.bfloat16)
    assert Call(*kind, **SIZES).key == Call(*kind, **(SIZES | {"rows": 100_000, "keys": 100_001, "width": 130})).key


def _tune_many(directory: str, name: str) -> None:
    os.environ["CLOSECALL_CACHE"] = directory
    for i in range(20):
        tuning._keep(f"{name} {i}", Launch(16, 16, 4, 2))


def test_two_processes_keep_each_others_entries(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_tune_many, args=(str(tmp_path), name)) for name in ("a", "b")]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(json.loads((tmp_path / "launch.json").read_text())) == 40


def test_an_unwritable_directory_is_named_and_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLOSECALL_CACHE", str(tmp_path / "file"))
    watch = Stopwatch()
    with pytest.warns(UserWarning, match=r"the tuned launch is not remembered in .*file/launch\.json"):
        best = tuning.tune(KEY, launch.table("attend", "sm_90", 128, 128, "bf16"), watch.call, watch.bench)
    assert best.num_warps == 8


def test_whatever_the_compiler_refuses_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    testing = pytest.importorskip("triton.testing")

    def refuse(run: Callable[[], None], **_: Any) -> float:
        raise errors.PTXASError("too many registers")

    monkeypatch.setattr(testing, "do_bench", refuse)
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    assert tuning.tune(KEY, start, lambda one: None, tuning._bench) == start
    assert not tuning.cache_file().exists()


def test_a_launch_that_does_not_fit_names_the_device_and_the_way_out() -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    def start(chosen: Launch) -> None:
        raise errors.OutOfResources(102_400, 101_376, "shared memory")

    call = Call("attend", "sm_89", 256, 256, torch.bfloat16, device="RTX 4090")
    with pytest.raises(
        RuntimeError, match=r"attend at head dim 256/256 in bf16 does not fit on RTX 4090 \(sm_89\).*flex"
    ):
        tuning.run(call, start)


def test_nothing_is_tuned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setenv("CLOSECALL_AUTOTUNE", "1")
    watch = Stopwatch()
    tuning.run(Call("attend", "sm_90", 128, 128, torch.bfloat16), watch.call)
    assert len(watch.ran) == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_call_is_tuned_once_and_only_on_a_device(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    watch = Stopwatch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(tuning, "_bench", watch.bench)
    monkeypatch.setenv("CLOSECALL_AUTOTUNE", "1")
    tuning.run(Call("attend", "sm_90", 128, 128, torch.bfloat16), watch.call)
    start = launch.table("attend", "sm_90", 128, 128, "bf16")
    assert len(watch.ran) == (len(tuning.candidates(start, tma=True)) + 1 if there else 1)
    assert watch.ran[-1] == (dataclasses.replace(start, num_warps=8) if there else start)
    before = len(watch.ran)
    tuning.run(Call("attend", "sm_90", 128, 128, torch.bfloat16), watch.call)
    assert len(watch.ran) == before + 1


@pytest.mark.parametrize("arch", launch.ARCHS)
def test_candidates_are_launches_near_the_first(arch: str) -> None:
    for dim in DIMS:
        start = launch.table("attend", arch, dim, dim, "bf16")
        found = tuning.candidates(start)
        assert found[0] == start
        assert len(set(found)) == len(found)
        for one in found[1:]:
            assert sum(getattr(one, f.name) != getattr(start, f.name) for f in dataclasses.fields(Launch)) == 1


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CLOSECALL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert tuning.cache_file() == tmp_path / "caches" / "closecall" / "launch.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.cache_file() == tmp_path / ".cache" / "closecall" / "launch.json"
