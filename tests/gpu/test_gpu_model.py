"""The model on paper: cases that can be computed by hand, limits, and that its errors come before its predictions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from closecall.cli import Parser
from closecall.gpu import cli, model, model_report, published
from closecall.gpu.compile import Facts
from closecall.gpu.devices import DEVICES, device
from closecall.gpu.model import LABEL, LAUNCH_MS, MEMORY_SHARE, Occupancy, Step, predict
from closecall.gpu.shapes import SHAPES, shape
from closecall.gpu.work import count
from closecall.policy import policy

K = 1024
SEVEN, A100, H100 = shape("qwen2.5-7b-1m"), device("A100"), device("H100")
SHARES = published.fitted()
TWO = Occupancy(2, True)
SPARSE = ("topk", "quest", "router", "router-on-quest")


def ours(context: int, name: str = "router-on-quest", occupancy: Occupancy = TWO, **overrides: Any) -> model.Prediction:
    return predict(SEVEN, A100, context, policy(name, **overrides), "ours", SHARES, occupancy)


# How much work there is.


def test_work_by_hand() -> None:
    work = count(policy("topk", budget=5, tile_factor=1), 7 * 64)
    assert (work.tiles, work.blocks, work.visible, work.kept, work.eligible) == (7, 7, 28, 1 + 2 + 3 + 4 + 5 + 5 + 5, 2)
    routed = count(policy("router", budget=5, tile_factor=1, q=0.5, rho=1.2), 7 * 64)
    assert routed.kept == 25 + 1  # one of the two eligible tiles gets a sixth block


def test_work_off_the_grid() -> None:
    work = count(policy("dense"), 100)
    assert (work.tiles, work.blocks, work.visible) == (2, 2, 3)
    work = count(policy("dense", block=32, tile=64), 100)
    assert (work.tiles, work.blocks, work.visible) == (2, 4, 2 + 4)


@pytest.mark.parametrize("context", [1, 64, 4 * K, 32 * K, 100_001])
def test_limits_of_the_router(context: int) -> None:
    topk, wide = count(policy("topk"), context), count(policy("topk", budget=66), context)
    assert count(policy("router", q=0.0), context).kept == topk.kept
    assert count(policy("router", q=1.0), context).kept == wide.kept
    assert count(policy("router", rho=1.0), context).kept == topk.kept
    assert topk.kept <= count(policy("router"), context).kept <= wide.kept
    everything = count(policy("topk", budget=10**6), context)
    assert everything.kept == everything.visible == count(policy("dense"), context).kept
    assert not everything.selects


@pytest.mark.parametrize("context", [0, -64, 1.5, True])
def test_contexts_that_are_none(context: Any) -> None:
    with pytest.raises(ValueError, match="context must be a whole number of tokens, at least 1, got"):
        count(policy("topk"), context)


def test_a_threshold_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="depends on the scores: use another trigger"):
        count(policy("router", trigger="absolute"), 32 * K)


# Time by hand.


def test_a_component_takes_its_longest_bound() -> None:
    peak, bandwidth = A100.tensor_tflops * 1e9, A100.bandwidth * 1e9 * MEMORY_SHARE  # per millisecond
    computing = model.component("x", A100, flops=3 * peak * 0.5, share=0.5, memory=2 * bandwidth)
    assert computing.ms == pytest.approx(3 + LAUNCH_MS)
    assert computing.bound == "tensor cores"
    moving = model.component("x", A100, flops=peak, memory=2 * bandwidth, launches=5)
    assert moving.ms == pytest.approx(2 + 5 * LAUNCH_MS)
    assert moving.bound == "memory"
    assert model.component("x", A100).bound == "launches"


def test_a_step_on_the_a100() -> None:
    step = model.step(A100, rows=64, keys=64, head_dim=128)
    # 4 x 64 x 64 x 128 at 2048 a clock (as near as the data sheet's rounded peak); 16 exponentials; 64 lanes; L2.
    assert step.tensor == pytest.approx(1024, rel=1e-3)
    assert step.exps == 256
    assert step.lanes == (5 * 4096 + 64 * 128) / 64
    assert step.l2 == pytest.approx(2 * 64 * 128 * 2 / (5120 / 108))


def test_occupancy_decides_what_overlaps() -> None:
    step = Step(tensor=100, exps=60, lanes=50, l2=80)
    assert step.clocks(Occupancy(1, True)) == 210
    assert step.clocks(Occupancy(2, True)) == 105
    assert step.clocks(Occupancy(3, True)) == 100
    assert step.clocks(Occupancy(1, False)) == 210 + 80 + 2 * model.LATENCY
    assert [step.bound(Occupancy(n, True)) for n in (1, 3)] == ["occupancy", "tensor cores"]
    assert Step(100, 60, 50, 300).bound(Occupancy(1, True)) == "L2"


def test_attention_by_hand() -> None:
    found = ours(32 * K, "topk")
    kept = sum(min(t + 1, 66) for t in range(512))
    clocks = model.step(A100, rows=64, keys=64, head_dim=128).tensor
    ms = 28 * kept / 108 * clocks / (A100.ghz * 1e6 * SHARES.reach) + LAUNCH_MS
    assert found.layer[-1].name == "attention over kept blocks"
    assert found.layer[-1].ms == pytest.approx(ms)
    assert found.layer[-1].flops == 4 * 28 * kept * 64 * 64 * 128


def test_half_tiles_read_keys_twice() -> None:
    whole, half = (ours(32 * K, occupancy=Occupancy(4, True, rows, 64)).layer[-1].ms for rows in (64, 16))
    assert half > whole  # a quarter of the rows needs four times the bytes from L2 per row


def test_a_prefill_is_its_layers() -> None:
    found = predict(shape("qwen3.6-35b"), device("H200"), 64 * K, policy("router"), "ours", SHARES, TWO)
    common = sum(c.ms for c in found.shared)
    assert found.layer_ms == pytest.approx(common + found.attention_ms)
    assert found.prefill_ms == pytest.approx(40 * common + 10 * found.attention_ms)
    assert found.attention_share == pytest.approx(10 * found.attention_ms / found.prefill_ms)


def test_shapes_hold_as_many_weights_as_their_names_say() -> None:
    """As the model cards say, less the embeddings: 7.6B - 1.1B, 14.8B - 1.6B, 12.2B - 1.3B, 8.0B - 1.1B."""
    for name, billions in (
        ("qwen2.5-7b-1m", 6.53),
        ("qwen2.5-14b", 13.2),
        ("mistral-nemo", 10.9),
        ("llama-3.1-8b", 6.98),
    ):
        assert SHAPES[name].weights == pytest.approx(billions * 1e9, rel=0.01)


def test_peaks_are_units_times_clock() -> None:
    """A multiprocessor of the A100 does 1024 multiply-adds a clock, one of Hopper 2048."""
    for found in DEVICES.values():
        each = {"sm_80": 1024, "sm_90": 2048}[found.arch]
        assert 2 * each * found.multiprocessors * found.ghz / 1e3 == pytest.approx(found.tensor_tflops, rel=0.001)


# What must hold whatever the figures are.


@pytest.mark.parametrize("name", SPARSE)
def test_more_context_takes_longer(name: str) -> None:
    times = [ours(n, name).prefill_ms for n in (K, 4 * K, 32 * K, 33 * K, 128 * K)]
    assert times == sorted(times)


def test_more_budget_takes_longer_and_more_residents_do_not() -> None:
    budgets = [ours(64 * K, budget=b).attention_ms for b in (8, 16, 33, 66, 200)]
    assert budgets == sorted(budgets)
    waiting, ahead = ([ours(64 * K, occupancy=Occupancy(n, p)).attention_ms for n in (1, 2, 4)] for p in (False, True))
    assert waiting == sorted(waiting, reverse=True)
    assert ahead == sorted(ahead, reverse=True)
    assert all(a <= w for a, w in zip(ahead, waiting, strict=True))
    assert ahead[0] > ahead[1]


@pytest.mark.parametrize("context", [4 * K, 32 * K])
def test_a_budget_that_covers_everything_is_our_dense(context: int) -> None:
    dense = ours(context, "dense")
    covering = ours(context, "router-on-quest", budget=10**6)
    assert covering.layer == dense.layer
    assert [c.name for c in dense.layer] == ["linear layers", "everything else", "attention over kept blocks"]


def test_the_limits_of_q_in_time() -> None:
    assert ours(64 * K, "router", q=0.0).prefill_ms == ours(64 * K, "topk").prefill_ms
    assert ours(64 * K, "router", q=1.0).prefill_ms == ours(64 * K, "topk", budget=66).prefill_ms


def test_a_faster_device_is_faster() -> None:
    times = [predict(SEVEN, d, 64 * K, policy("quest"), "ours", SHARES, TWO).prefill_ms for d in DEVICES.values()]
    assert times == sorted(times, reverse=True)


def test_the_cautious_end_is_slower() -> None:
    cautious = SHARES.cautious()
    assert cautious.reach == pytest.approx(SHARES.paper_kernel * SHARES.dense["sm_80"])
    assert (
        predict(SEVEN, H100, 64 * K, policy("quest"), "ours", cautious, TWO).prefill_ms
        > predict(SEVEN, H100, 64 * K, policy("quest"), "ours", SHARES, TWO).prefill_ms
    )


# Against the paper.


def test_fitted_figures_are_met_exactly_and_the_rest_is_stated() -> None:
    figures = published.check()
    roles = [f.role for f in figures]
    assert roles == sorted(roles, key=published.ROLES.index)
    fitted = [f for f in figures if f.role == "fitted"]
    assert len(fitted) == 5  # as many as shares that are fitted
    assert all(f.error == pytest.approx(0, abs=1e-9) for f in fitted)
    held = [f for f in figures if f.role == "held out"]
    assert all(f.error != 0 for f in held)
    assert len(held) > 2 * len(fitted)


def test_every_figure_that_was_asked_for_is_there() -> None:
    values = {f.name: f.published for f in published.check()}
    for size, share, wall in ((32, 0.31, 1.09), (64, 0.45, 0.87), (128, 0.63, 0.62)):
        assert values[f"attention's share, 7B-1M at {size}K"] == share
        assert values[f"router's wall over dense, 7B-1M at {size}K"] == wall
    for size, wall in ((32, 1.12), (64, 1.00), (128, 0.80)):
        assert values[f"router's wall over dense, Qwen3.6 at {size}K"] == wall
    assert {463.0, 69.0, 121.0} <= set(values.values())


def test_the_error_moves_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is computed, not written down: a model that is wrong by a factor shows it."""
    before = {f.name: f.error for f in published.check()}
    monkeypatch.setattr(published, "fitted", lambda: dataclasses.replace(SHARES, linear=SHARES.linear / 2))
    after = {f.name: f.error for f in published.check.__wrapped__()}
    assert after["attention's share, 7B-1M at 32K"] < before["attention's share, 7B-1M at 32K"] - 0.2


# The command.


def run(*argv: str) -> None:
    parser = Parser(prog="closecall")
    cli.add_gpu_model(parser.add_subparsers())
    args = parser.parse_args(["gpu-model", *argv])
    args.run(args)


def facts(arch: str, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": "attend D128 bf16", "arch": arch, "head_dim": 128, "dtype": "bf16", "num_warps": 4, "num_stages": 3,
        "must_pipeline": True, "rows": 64, "keys": 64, "block": 64, "registers": 200, "scalar_registers": None,
        "stack": 0, "spills": 0, "scalar_spills": None, "shared": 1024, "tensor_columns": 0, "loop": True, "tensor": 12,
        "tensor_kind": "wgmma", "copies": 16, "loads": 0, "loads_ahead": 0, "resident_blocks": 2,
        "resident_warps": 8, "limit": "registers",
    }  # fmt: skip
    return Facts.from_dict(made | more).to_dict()


@pytest.fixture
def report(tmp_path: Path) -> str:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"variants": [facts("sm_80"), facts("sm_90", resident_blocks=3)]}))
    return str(path)


def test_the_error_comes_first_and_every_prediction_is_labelled(
    report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "m.md"
    run("--report", report, "--model", "qwen2.5-7b-1m,llama-3.1-8b", "--markdown", str(page))
    for said in (capsys.readouterr().out, page.read_text()):
        error = said.index("How far the model is from the paper's published times")
        assert "held out" in said[error:]
        for name in ("qwen2.5-7b-1m", "llama-3.1-8b"):
            assert error < said.index(f"{name}, router-on-quest: {LABEL}")
            assert f"Where a layer's time goes, {name}: {LABEL}" in said
        assert "tile budget" in said or "keep 66 blocks a tile" in said
        assert "sm_90: 3 thread blocks" in said
    command = f"`closecall gpu-model --model qwen2.5-7b-1m,llama-3.1-8b --report {report} --markdown {page}`"
    assert command in page.read_text()


def test_json(report: str, tmp_path: Path) -> None:
    run("--report", report, "--device", "a100,h100", "--context", "64k", "--json", str(tmp_path / "m.json"))
    (data,) = json.loads((tmp_path / "m.json").read_text())
    assert data["label"] == LABEL
    assert list(data).index("published") < list(data).index("cases")
    assert {f["role"] for f in data["published"]} == set(published.ROLES)
    assert data["occupancy"]["sm_90"] == {"blocks": 3, "pipelined": True, "rows": 64, "keys": 64}
    first, second = data["cases"]
    assert [c["sdpa"]["device"] for c in (first, second)] == ["A100", "H100"]
    assert (first["flash3"], second["flash3"]["device"]) == (None, "H100")
    for case in (first, second):
        for way in ("sdpa", "paper", "ours", "ours_cautious"):
            assert case[way]["label"] == LABEL
            assert case[way]["layer_ms"] == pytest.approx(sum(c["ms"] for c in case[way]["components"]))
        assert case["ours"]["prefill_ms"] < case["ours_cautious"]["prefill_ms"]


def test_dense_can_be_asked_for(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("--report", report, "--policy", "dense", "--device", "A100", "--context", "8k")
    assert f"qwen2.5-7b-1m, dense: {LABEL}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "qwen2.5-7b"], "unknown model shape 'qwen2.5-7b': did you mean 'qwen2.5-7b-1m'"),
        (["--model", "llama-3-8b"], "unknown model shape 'llama-3-8b': did you mean 'llama-3.1-8b'"),
        (["--device", "H10"], "unknown device 'H10': did you mean 'H100'"),
        (["--policy", "roter"], "unknown policy 'roter': did you mean 'router'"),
        (["--policy", "auto"], "not outliers under softmax"),
        (["--context", "0"], "--context takes whole numbers like 128 or 32k, got '0'"),
        (["--context", "-4k"], "--context"),
        (["--context", ""], "--context names nothing"),
        (["--budget", "x"], "--budget takes whole numbers"),
        (["--model", "qwen3.6-35b"], "has no 'attend D256 bf16' for sm_80"),
    ],
)
def test_bad_input(argv: list[str], message: str, report: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message):
        run("--report", report, *argv)
    assert capsys.readouterr().out == ""  # before anything was said


def test_bad_reports(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a report: write one with `closecall gpu-report --json"):
        run("--report", str(path))
    path.write_text(json.dumps({"variants": [facts("sm_80", stack=8), facts("sm_90")]}))
    with pytest.raises(ValueError, match="attend D128 bf16 for sm_80 cannot be modelled: 8 bytes of stack"):
        run("--report", str(path))


def test_names_of_models() -> None:
    assert shape("Qwen/Qwen3.6-35B-A3B") is shape("qwen3.6-35b-a3b") is shape("qwen3.6-35b")
    assert {s.name for s in SHAPES.values()} == set(SHAPES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predict(SEVEN, A100, K, policy("dense"), "our", SHARES), "unknown way 'our': did you mean 'ours'"),
        (lambda: predict(SEVEN, A100, K, policy("topk"), "sdpa", SHARES), "SDPA runs dense attention only, not 'topk'"),
        (lambda: predict(SEVEN, A100, K, policy("dense"), "paper", SHARES), "ran dense attention by SDPA"),
        (lambda: predict(SEVEN, A100, K, policy("topk"), "ours", SHARES), "needs their occupancy"),
        (lambda: predict(SEVEN, A100, K, policy("auto"), "ours", SHARES, TWO), "not outliers under softmax"),
        (lambda: Occupancy(0, True), "0 thread blocks fit cannot run"),
        (lambda: Occupancy(1, True, rows=0), "needs queries and keys, got 0 x 64"),
    ],
)
def test_bad_calls(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_occupancy_is_compiled_when_no_report_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Made:
        def __enter__(self) -> Made:
            return self

        def __exit__(self, *_: object) -> None: ...

        def facts(self, arch: str, name: str) -> Facts:
            asked.append((arch, name))
            return Facts.from_dict(facts(arch))

    monkeypatch.setattr(model_report, "Compiler", Made)
    run("--device", "H100,H200", "--context", "8k")
    assert asked == [("sm_90", "attend D128 bf16")]
