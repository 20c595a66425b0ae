"""A whole validation: what is run, stored, gone on with, refused and reported, on the CPU and on a faked GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

import closecall
from closecall import backends
from closecall.backends import flex
from closecall.backends.triton import device as triton_device
from closecall_lab.bench.validate import behaviour, device, graphs, hardware, report, runner, speed
from closecall_lab.bench.validate.behaviour import EVERYTHING, Behaviour, capture, repeats, second, streams
from closecall_lab.bench.validate.cases import POLICIES, Case
from closecall_lab.bench.validate.cases import matching as matching_of
from closecall_lab.bench.validate.device import Cpu, Cuda
from closecall_lab.bench.validate.speed import Layer, Speed, bytes_needed
from closecall_lab.spine import memory, timing
from closecall_lab.spine.results import Facts

SMALL = Speed(
    contexts=(768,), dtype="fp32", heads=2, kv_heads=1, dim=32, intermediate=64, budget=3, contenders=POLICIES,
    repeats=3, seconds=0.01, inputs=("gaussian",),
)  # fmt: skip
FINGERPRINT = runner.fingerprint


def matching(patterns: list[str]) -> Any:
    return matching_of(patterns, EVERYTHING)


FEW = matching(["topk, fp32", "decode, dense"])


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.001)
    monkeypatch.setattr(device, "LOAD_SECONDS", 0.01)
    monkeypatch.setattr(runner, "fingerprint", lambda: "fixed")  # whoever edits sources while tests run changes it


def records(out: Path) -> list[Facts]:
    found: list[Facts] = json.loads((out / "validate.json").read_text())["records"]
    return found


def test_a_whole_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run(Cpu(), "auto", FEW, SMALL, tmp_path)
    said = capsys.readouterr()
    assert [r["cell"]["kind"] for r in records(tmp_path)] == ["check", "check", "timing"]
    assert all(r["result"]["problem"] is None for r in records(tmp_path))
    page = (tmp_path / "validate.md").read_text()
    for text in (page, said.out):
        assert "2 pass" in text
        assert "sources: fixed" in text
        assert f"torch: {torch.__version__}" in text
    assert "[3/3] timing 768 gaussian fp32 D=32, 2 heads on 1: pass" in said.err
    header = next(line for line in page.splitlines() if line.startswith("| context"))
    for column in ("policy", "attention ms", "share", "wall vs dense"):
        assert f" {column} " in header
    names = [row["name"] for row in records(tmp_path)[2]["result"]["rows"]]
    assert names == ["sdpa", *POLICIES]


def test_ratios_follow_from_the_rounds(tmp_path: Path) -> None:
    runner.run(Cpu(), "auto", [], SMALL, tmp_path)
    result = records(tmp_path)[0]["result"]
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["sdpa"]["over_dense"] == rows["sdpa"]["wall"] == rows["dense"]["over_our_dense"] == 1
    assert rows["dense"]["kept"] == 1
    assert rows["dense"]["select_ms"] is None
    assert 0 < rows["topk"]["kept"] < 1
    assert rows["topk"]["effective_budget"] <= 6
    assert rows["topk"]["kept"] == rows["quest"]["kept"] <= rows["router"]["kept"]
    for row in rows.values():
        assert 0 < row["share"] < 1
        # The layer's other parts are in both: its ratio lies between attention's own and 1. Medians of three rounds may
        # belong to different rounds, so only those that are clear of 1 must be on the same side.
        if abs(row["over_dense"] - 1) > 0.5:
            assert (row["over_dense"] - 1) * (row["wall"] - 1) > 0


def test_wall_and_share_are_medians_over_rounds() -> None:
    laps = {
        "sdpa": [{"": 4.0}, {"": 4.0}, {"": 8.0}],
        speed.REST: [{"": 4.0}, {"": 2.0}, {"": 8.0}],
        "ours": [{"select": 1.0, "attend": 1.0}, {"select": 0.5, "attend": 0.5}, {"select": 6.0, "attend": 2.0}],
    }
    samples = timing.Samples(laps, {"ours": 2**20})
    steps: dict[str, Any] = {"select": None, "attend": None}
    row = speed._row(timing.Contender("ours", steps, 1), samples, Cpu(), "sdpa")
    assert row["share"] == 1 / 3  # of 2/6, 1/3 and 8/16
    assert row["wall"] == 0.75  # of 6/8, 3/6 and 16/16
    assert row["over_dense"] == 0.5  # of 2/4, 1/4 and 8/8
    assert row["select_share"] == 0.5  # of 1/2, 1/2 and 6/8
    assert row["extra_mib"] == 1
    assert row["over_our_dense"] is None


def test_the_same_command_goes_on_and_tries_failures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []
    fails = {"topk, fp32"}

    def fake(case: Case, *_: Any) -> Facts:
        tried.append(case.name)
        if case.name in fails:
            raise ZeroDivisionError("a bug\nwith a long story")
        return {}

    monkeypatch.setattr(runner, "check", fake)
    assert not runner.run(Cpu(), "reference", FEW, None, tmp_path)
    assert tried == ["topk, fp32", "decode, dense"]  # the failure did not stop the rest
    assert "topk, fp32: FAIL: ZeroDivisionError: a bug\n" in capsys.readouterr().err
    assert "| topk, fp32 | FAIL |" in (tmp_path / "validate.md").read_text()
    fails.clear()
    more = [*FEW, *matching(["packed"])]
    assert runner.run(Cpu(), "reference", more, None, tmp_path)
    assert tried[2:] == ["packed", "topk, fp32"]  # what is new first, what failed last
    assert "1 of 3 are in" in capsys.readouterr().err
    assert len(records(tmp_path)) == 3
    assert runner.run(Cpu(), "reference", more, None, tmp_path)
    assert len(tried) == 4
    assert runner.run(Cpu(), "reference", more, None, tmp_path, fresh=True)
    assert len(tried) == 7


def test_what_was_done_before_a_kill_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def killed(case: Case, *_: Any) -> Facts:
        tried.append(case.name)
        if len(tried) == 2:
            raise KeyboardInterrupt  # not an Exception: nothing may swallow it
        return {}

    monkeypatch.setattr(runner, "check", killed)
    with pytest.raises(KeyboardInterrupt):
        runner.run(Cpu(), "reference", FEW, None, tmp_path)
    assert runner.run(Cpu(), "reference", FEW, None, tmp_path)
    assert tried == ["topk, fp32", "decode, dense", "decode, dense"]


def test_results_of_other_code_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def note(case: Case, *_: Any) -> Facts:
        tried.append(case.name)
        return {}

    monkeypatch.setattr(runner, "check", note)
    runner.run(Cpu(), "reference", FEW, None, tmp_path)
    monkeypatch.setattr(runner, "fingerprint", lambda: "other")
    runner.run(Cpu(), "reference", FEW, None, tmp_path)
    runner.run(Cpu(), "flex", FEW, None, tmp_path)
    assert len(tried) == 6


def test_the_fingerprint_is_of_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "fingerprint", FINGERPRINT)
    monkeypatch.setattr(closecall, "__file__", str(tmp_path / "__init__.py"))
    fingerprints = [runner.fingerprint()]
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("sub/c.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        fingerprints.append(runner.fingerprint())
    assert len(set(fingerprints)) == len(fingerprints)
    (tmp_path / "notes.txt").write_text("no source")
    assert runner.fingerprint() == fingerprints[-1]


def test_a_case_that_needs_more_memory_than_there_is_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cpu, "free_bytes", lambda _: 2**30)
    assert runner.run(Cpu(), "reference", matching(["strides: far*"]), None, tmp_path)
    assert records(tmp_path)[0]["result"]["skipped"] == "needs 12.0 GiB, 1.0 GiB are free"
    assert "1 skipped" in (tmp_path / "validate.md").read_text()


def test_contexts_that_do_not_fit_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cpu, "free_bytes", lambda _: 1_000_000)
    monkeypatch.setattr(runner, "check", lambda *_: pytest.fail("ran"))
    needed = bytes_needed(SMALL.cells()[0], "cpu")
    assert needed > 1_000_000
    with pytest.raises(ValueError, match=rf"--contexts 768 needs up to {needed:,} bytes .* 1,000,000 .* fewer --heads"):
        runner.run(Cpu(), "auto", FEW, SMALL, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_budget_below_the_forced_blocks_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "check", lambda *_: pytest.fail("ran"))
    settings = dataclasses.replace(SMALL, budget=1, contenders=("topk",))
    with pytest.raises(ValueError, match="tile budget 2 must exceed the 2 forced blocks"):
        runner.run(Cpu(), "auto", FEW, settings, tmp_path)


@pytest.fixture
def returned() -> Iterator[None]:
    """What is freed goes back to the system at once: else a peak tells what tests before this one left behind."""
    option, libc = -3, ctypes.CDLL(None)  # M_MMAP_THRESHOLD of malloc.h
    if not hasattr(libc, "mallopt"):
        pytest.skip("this system's malloc has no options")
    libc.mallopt(option, 2**16)
    yield
    libc.mallopt(option, 2**25)  # where malloc itself would take it in time


@pytest.mark.usefixtures("returned")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_more_memory_is_taken_than_was_said(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long and narrow, and less granted to the libraries: a table of rows x keys would not go unseen. Without
    # instructions for bf16 its matrices are multiplied number by number, and narrow ones take least time.
    monkeypatch.setattr(speed, "WORKSPACE", 16 * 2**20)
    settings = Speed((4096,), dtype, 2, 2, 64, 64, 8, ("router-on-quest",), 1, 0.01)
    cell = settings.cells()[0]
    # Libraries take theirs at the first call: a small one, because CPUs may multiply bf16 slowly.
    small = dataclasses.replace(settings, heads=1, kv_heads=1, dim=64, intermediate=64)
    speed.measure(small.cells()[0], small, Cpu(), "auto")
    peaks: list[int] = []
    real = memory.mark
    before = real()
    if before is None:
        pytest.skip("this system does not tell peaks")

    def kept_mark() -> int | None:  # the loop's own marks reset the peak: take it down first
        peaks.append(memory._status("VmHWM"))
        return real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "mark", kept_mark)
        speed.measure(cell, settings, Cpu(), "auto")
    peaks.append(memory._status("VmHWM"))
    assert len(peaks) > 3
    assert max(peaks) - before <= bytes_needed(cell, "cpu")


def test_the_rest_of_the_layer_covers_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in multiply-adds, by torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(speed, "ROWS", 100)
    (cell,) = SMALL.cells()
    layer = Layer.of(cell, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        layer.run()
    hidden, kv = 64, 32
    per_row = hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * 64
    assert counter.get_total_flops() == 2 * 768 * per_row


# --- On a GPU that is faked at torch.cuda ----------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend for the faked GPU: the reference under another name."""
    monkeypatch.setattr(backends, "NAMES", (*backends.NAMES, "faked"))
    monkeypatch.setitem(backends.MODULES, "faked", "faked")
    monkeypatch.setitem(sys.modules, "closecall.backends.faked", backends.load("reference"))
    return "faked"


def test_a_whole_run_on_a_faked_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faked: str) -> None:
    """CPU tensors, but events, streams, graphs, memory and another GPU as on a real machine."""
    monkeypatch.setattr(behaviour, "REPEATS", 3)
    monkeypatch.setattr(
        hardware, "read", lambda which, amd, bus: {"clock_mhz": 1410.0, "power_w": 399.5, "celsius": None}
    )
    fake = FakeCuda(step_ms=5, allocated=0, peak=3 * 2**20, gpus=2)
    on = fake.install(monkeypatch)
    captured: list[str] = []

    def capture(self: Any, call: Any, q: torch.Tensor, other: torch.Tensor) -> str | None:
        assert call().shape == q.shape == other.shape
        captured.append("asked")
        return "it waits" if len(captured) == 2 else None

    monkeypatch.setattr(Cuda, "capture_problem", capture)
    settings = dataclasses.replace(SMALL, contenders=("dense", "topk"), inputs=("gaussian", "clustered"))
    names = ["50 repeats*topk", "*graph capture: *", "two streams at once: auto", "the other GPUs: decode"]
    assert not runner.run(on, faked, [*FEW[:1], *matching(names)], settings, tmp_path)
    stored = {r["cell"].get("case", r["cell"].get("inputs")): r["result"] for r in records(tmp_path)}
    assert len(captured) == len(POLICIES) + 4  # auto, decode, packed, padded
    assert stored["no host synchronisation, graph capture: topk"]["problem"] == "it waits"
    assert stored["no host synchronisation, graph capture: packed"]["problem"] is None
    assert stored["50 repeats, bit for bit: topk"] == {"problem": None, "repeats": 3}
    assert stored["two streams at once: auto"] == {"problem": None, "streams": 2}
    assert stored["the other GPUs: decode"]["cpu"]["device"] == "Fake 100"
    timed = stored["gaussian"]
    rows = {row["name"]: row for row in timed["rows"]}
    assert list(rows) == ["sdpa flash", "dense", "topk"]
    assert timed["best_dense"] == "sdpa flash"
    assert "not installed" in timed["missing"]["fa3"]
    assert "sdpa cudnn" in timed["missing"]  # which does not run on a CPU
    assert rows["sdpa flash"]["ms"] == 5  # one step between two events
    assert rows["topk"]["ms"] == 10
    assert rows["topk"]["graph_ms"] == 5  # a replay is one step
    assert rows["topk"]["graph_speedup"]["times"] == 1
    assert rows["topk"]["select_share"] == 0.5
    assert rows["topk"]["over_dense"] == 2
    assert rows["topk"]["wall"] == 1.5  # 10 + 5 over 5 + 5
    assert rows["sdpa flash"]["extra_mib"] == 3 - 4 * 2 * 768 * 32 / 2**20
    assert stored["clustered"]["rows"][2]["together"] > rows["topk"]["together"]
    page = (tmp_path / "validate.md").read_text()
    assert "- capability: 9.0" in page
    assert "by events on the device's stream" in page
    assert "Under load at 768 gaussian: clock mhz 1410.0, power w 399.5" in page


def test_a_graph_that_gives_other_bits_is_wrong_and_gets_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)
    real = graphs.Graphs.capture

    def spoilt(self: Any, call: Any) -> Any:
        replay, out = real(self, call)
        fake.replay = lambda: out.view(-1)[-1].add_(1)
        return replay, out

    monkeypatch.setattr(graphs.Graphs, "capture", spoilt)
    settings = dataclasses.replace(SMALL, contenders=("dense", "topk"))
    assert not runner.run(on, faked, [], settings, tmp_path)
    assert "WRONG: 1 of 1 failed. timing at 768, gaussian keys: dense replayed from a graph" in capsys.readouterr().out
    assert "rows" not in records(tmp_path)[0]["result"]


def test_contenders_that_cannot_be_captured_are_named(monkeypatch: pytest.MonkeyPatch, faked: str) -> None:
    on = FakeCuda().install(monkeypatch)

    def refuse(self: Any, call: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs.Graphs, "capture", refuse)
    settings = dataclasses.replace(SMALL, contenders=("dense",))
    (cell,) = settings.cells()
    facts = speed.measure(cell, settings, on, faked)
    assert set(facts["no_graph"]) == {"sdpa flash", "dense"}
    assert [row["graph_ms"] for row in facts["rows"]] == [None, None]
    notes = report.times({"device": "x"}, [(cell, facts | {"problem": None})], settings, "cpu").markdown()
    assert "- Not captured in a graph: dense (ours): RuntimeError: operation not permitted" in notes


def test_out_of_memory_in_the_middle_keeps_the_rest_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dataclasses.replace(SMALL, contexts=(512, 768), contenders=("dense", "topk"))
    real = speed.measure
    room = [700]

    def measure(cell: Facts, *rest: Any) -> Facts:
        if cell["context"] > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24.00 GiB.\nGPU 0 has")
        return real(cell, *rest)

    monkeypatch.setattr(speed, "measure", measure)
    assert not runner.run(Cpu(), "auto", FEW, settings, tmp_path)
    said = capsys.readouterr()
    assert "no memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 24.00 GiB." in said.err
    assert "RIGHT: 3 of 4 checks and timings passed." in said.out
    assert "OUT OF MEMORY: 1 of 4 could not be finished. timing at 768, gaussian keys: OutOfMemoryError" in said.out
    assert "leave them out with --contexts or --case" in said.out
    assert "topk is" in said.out  # what was timed is judged
    page = (tmp_path / "validate.md").read_text()
    assert "OUT OF MEMORY" in page
    assert "| 512 |" in page
    room[0] = 10_000
    assert runner.run(Cpu(), "auto", FEW, settings, tmp_path)
    assert "3 of 4 are in" in capsys.readouterr().err
    assert len(records(tmp_path)) == 4


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_a_host_without_memory_is_told_apart_from_a_wrong_answer(error: Exception) -> None:
    def fail() -> Facts:
        raise error

    result, alive = runner._attempt(runner.Job({}, "x", fail), Cpu())
    assert alive
    assert (result["problem"], report.verdict(result)) == (None, "no memory")


def test_a_dim_or_type_that_no_kernel_takes_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(runner, "check", lambda *_: pytest.fail("ran"))
    settings = dataclasses.replace(SMALL, dim=320)
    with pytest.raises(ValueError, match="no Triton kernel for head dim 320, the largest is 256"):
        runner.run(Cpu(), "triton", FEW, settings, tmp_path)
    old = "triton 3.4.0 is older than 3.5: pip install -U triton"
    monkeypatch.setattr(triton_device, "installed_problem", lambda: old)
    with pytest.raises(ValueError, match=r"triton 3\.4\.0 is older than 3\.5: pip install -U triton"):
        runner.run(FakeCuda().install(monkeypatch), "auto", FEW, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_kernels_themselves_end_to_end_under_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Triton backend on the faked GPU: checks, behaviour, timing and verdict in one run, on very few blocks."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(behaviour, "REPEATS", 2)
    monkeypatch.setattr(graphs, "WARM_UPS", 1)
    fake = FakeCuda(gpus=2)
    on = fake.install(monkeypatch)
    real = graphs.Graphs.capture

    def computing(self: Any, call: Any) -> Any:
        replay, out = real(self, call)
        fake.replay = lambda: out.copy_(call())
        return replay, out

    def captured(*args: Any) -> Facts:
        """With a graph that computes again when it is replayed; the timed ones only take their time."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs.Graphs, "capture", computing)
            found = capture(*args)
        fake.replay = lambda: None
        return found

    few = {"budget": 4, "tile_factor": 1}
    small = Case("small", "quest", "fp32", dim=16, heads=1, rows=100, keys=264, overrides=few)  # two tiles, five blocks
    looks = [Behaviour(look.__name__, small, look) for look in (repeats, captured, streams, second)]
    settings = Speed((320,), "fp32", 1, 1, 16, 16, 2, ("quest",), 3, 0.01, ("gaussian",))
    assert runner.run(on, "auto", looks, settings, tmp_path)
    said = capsys.readouterr().out
    assert "RIGHT: 5 of 5 checks and timings passed." in said
    assert "quest is not faster than the best dense at any context timed for certain" in said  # a clock that only steps
    assert {r["cell"]["backend"] for r in records(tmp_path)} == {"triton"}


def test_after_the_device_is_lost_the_same_command_goes_on_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)
    tried: list[str] = []

    def crash(case: Case, *_: Any) -> Facts:
        tried.append(case.name)
        if case.name == "topk, fp32":
            fake.broken = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {}

    monkeypatch.setattr(runner, "check", crash)
    assert not runner.run(on, "reference", FEW, None, tmp_path)
    assert tried == ["topk, fp32"]
    assert "goes on with the rest" in capsys.readouterr().err
    fake.broken = False
    assert not runner.run(on, "reference", FEW, None, tmp_path)
    assert tried[1:] == ["decode, dense", "topk, fp32"]
    assert len(records(tmp_path)) == 2


def test_on_a_gpu_auto_means_the_kernels_written_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    on = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(backends, "choose", lambda name, _: asked.append(name))
    assert runner.resolve("auto", on) == "triton"
    assert runner.resolve("flex", on) == "flex"
    assert asked == ["triton", "flex"]
    assert runner.resolve("auto", Cpu()) in ("cpu", "reference")


# --- FlexAttention -----------------------------------------------------------------------------------------------


def test_flexattention_runs_on_the_routers_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selection: Any, *_: Any) -> Any:
        given.append(selection)
        return lambda: q

    monkeypatch.setattr(torch.compiler, "reset", lambda: None)  # nothing is compiled here
    monkeypatch.setattr(flex, "compiled", compiled)
    settings = dataclasses.replace(SMALL, contenders=(*POLICIES, "flex"))
    (cell,) = settings.cells()
    facts = speed.measure(cell, settings, Cpu(), "auto")
    rows = {row["name"]: row for row in facts["rows"]}
    assert rows["router-on-quest"]["effective_budget"] == given[0].effective_budget
    assert rows["flex"]["ms"] > 0

    def none(*_: Any) -> Any:
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(flex, "compiled", none)
    facts = speed.measure(cell, settings, Cpu(), "auto")
    assert facts["missing"] == {"flex": "RuntimeError: no compiler"}
    assert [row["name"] for row in facts["rows"]] == ["sdpa", *POLICIES]
    table = report.times({"device": "x"}, [(cell, facts | {"problem": None})], settings, "cpu")
    assert "- Not timed: FlexAttention (router-on-quest's blocks): RuntimeError: no compiler" in table.markdown()
