"""Other people's dense attention, kinds of keys, the vendor's tool and the list of launches, on fakes of each."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda

import closecall
from closecall.backends import flex
from closecall.backends.triton import interpret
from closecall_lab.bench.validate import draws, hardware, launched, rivals
from closecall_lab.bench.validate.device import Cpu
from closecall_lab.spine import inputs

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.fixture
def qkv() -> QKV:
    return inputs.qkv(4, 2, 96, 96, 16, "fp32")


def fa3(with_sums: bool) -> ModuleType:
    module = ModuleType(rivals.FA3_MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(rivals.FA3_MODULE, None)

    # The public function has more arguments, all by name with defaults, and returns the log-sum-exp in some releases.
    def flash_attn_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
        qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
        window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
        pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
    ) -> Any:  # fmt: skip
        assert causal
        assert q.stride(-1) == k.stride(-1) == 1  # [B, N, H, D]: it copies what is not
        assert (q.shape[1], q.shape[2] % k.shape[2]) == (k.shape[1], 0)
        out = dense(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        return (out, None) if with_sums else out

    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("with_sums", [True, False])
def test_everybody_who_is_there_computes_the_same(monkeypatch: pytest.MonkeyPatch, qkv: QKV, with_sums: bool) -> None:
    on = FakeCuda().install(monkeypatch)
    monkeypatch.setitem(sys.modules, rivals.FA3_MODULE, fa3(with_sums))
    monkeypatch.setattr(flex, "compiled", lambda q, k, v, kept, *_: lambda: dense(q, k, v))
    found, missing = rivals.there(*qkv, on, compile_flex=True)
    assert list(found) == [rivals.FLASH, rivals.FA3, rivals.FLEX]
    assert set(missing) == {rivals.CUDNN}
    for run in found.values():
        torch.testing.assert_close(run(), dense(*qkv))
    assert rivals.FLEX not in rivals.there(*qkv, on, compile_flex=False)[0]
    assert list(rivals.there(*qkv, Cpu(), compile_flex=True)[0]) == [rivals.SDPA]


def test_those_who_are_not_there_are_named_with_reasons(monkeypatch: pytest.MonkeyPatch, qkv: QKV) -> None:
    on = FakeCuda().install(monkeypatch)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no kernel for float32\nand more")

    monkeypatch.setitem(rivals.MAKERS, rivals.FLASH, refuse)
    monkeypatch.setattr(rivals, "_efficient", lambda q, k, v: lambda: dense(q, k, v))
    found, missing = rivals.there(*qkv, on, compile_flex=False)
    assert list(found) == [rivals.EFFICIENT]  # only where the others do not run
    assert missing[rivals.FLASH] == "RuntimeError: no kernel for float32"
    assert missing[rivals.FA3] == "RuntimeError: flash_attn_interface is not installed"
    monkeypatch.setattr(rivals, "_efficient", refuse)
    with pytest.raises(RuntimeError, match=r"takes these tensors \(sdpa flash: .*sdpa cudnn.*: try another --dtype"):
        rivals.there(*qkv, on, compile_flex=False)


def test_a_rival_that_takes_the_device_down_or_the_memory_does_not_pass_for_missing(
    monkeypatch: pytest.MonkeyPatch, qkv: QKV
) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def lost(*_: Any) -> Any:
        fake.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for maker, says in ((full, "out of memory"), (lost, "illegal memory access")):
        monkeypatch.setitem(rivals.MAKERS, rivals.CUDNN, maker)
        with pytest.raises(RuntimeError, match=says):
            rivals.there(*qkv, on, compile_flex=False)


def test_clustered_keys_are_kept_together() -> None:
    policy = closecall.policy("topk", budget=4)
    share = {}
    for kind in draws.KINDS:
        q, k, v = draws.tensors(kind, 2, 1, 4096, 32, "fp32")
        assert torch.equal(v, draws.tensors(draws.GAUSSIAN, 2, 1, 4096, 32, "fp32")[2])
        kept = closecall.select(q, k, policy)
        share[kind] = draws.together(kept.kv_idx, kept.counts)
    assert share["clustered"] > 1.5 * share["gaussian"]


def test_together_by_hand() -> None:
    kept = torch.tensor([[0, 1, 2, 7, 9, 9], [3, 5, 9, 9, 9, 9]])
    assert draws.together(kept, torch.tensor([4, 2])) == 2 / 4
    assert draws.together(kept[:, :1], torch.tensor([1, 1])) == 0


# --- Clocks and power ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows", [hardware.HELD_BACK[0], hardware.HELD_BACK[1], None])
def test_clocks_and_power(monkeypatch: pytest.MonkeyPatch, knows: str | None) -> None:
    """A driver knows one name of the reasons, or the other, or none; it fails a query with a name it does not know."""
    asked: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: Any) -> Any:
        asked.append(command)
        fields = command[1].removeprefix("--query-gpu=").split(",")
        if any("reasons" in name and name != knows for name in fields):
            raise subprocess.CalledProcessError(
                2, command, output=f'Field "{fields[0]}" is not a valid field to query.'
            )
        known = dict(zip(hardware.NVIDIA, ("1410", "1980", "1593", "398.50", "[N/A]", "61"), strict=True))
        return SimpleNamespace(stdout=", ".join(known.get(name, "0x0000000000000044") for name in fields) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    held_back = {"held_back_by": ["power cap", "hardware thermal"]} if knows else {}
    assert hardware.read("GPU-7", amd=False) == {
        "clock_mhz": 1410, "most_clock_mhz": 1980, "memory_clock_mhz": 1593, "power_w": 398.5, "most_power_w": None,
        "celsius": 61, **held_back,
    }  # fmt: skip
    assert all(command[-1] == "GPU-7" for command in asked)


# As rocm-smi 6.2 and 5.6 write it, and amd-smi 6 and 7.
MI300 = {"sclk clock speed:": "(2100Mhz)", "mclk clock speed:": "(1300Mhz)", "Max Graphics Package Power (W)": "750.0",
         "Current Socket Graphics Package Power (W)": "612.0", "Temperature (Sensor junction) (C)": "71.0",
         "Temperature (Sensor memory) (C)": "60.0", "PCI Bus": "0000:C9:00.0"}  # fmt: skip
MI250 = {"sclk clock speed:": "(1700Mhz)", "mclk clock speed:": "(1600Mhz)", "PCI Bus": "0000:2F:00.0",
         "Average Graphics Package Power (W)": "128.0", "Temperature (Sensor edge) (C)": "N/A"}  # fmt: skip
METRIC = {
    "gpu": 1,
    "power": {"socket_power": {"value": 612, "unit": "W"}, "throttle_status": "N/A"},
    "clock": {"gfx_0": {"clk": {"value": 2100, "unit": "MHz"}, "max_clk": {"value": 2100, "unit": "MHz"}}, "mem_0": {
        "clk": "N/A"}},
    "temperature": {"edge": "N/A", "hotspot": {"value": 71, "unit": "C"}},
}  # fmt: skip


def test_clocks_and_power_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str] = {}

    def run(command: tuple[str, ...], **_: Any) -> Any:
        if command[0] not in said:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=said[command[0]])

    monkeypatch.setattr(subprocess, "run", run)
    assert hardware.read("0", amd=True) is None
    warning = "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n"
    said["rocm-smi"] = warning + json.dumps({"card0": MI250, "card1": MI300, "system": {"Driver version": "6.8"}})
    new = {"clock_mhz": 2100, "memory_clock_mhz": 1300, "power_w": 612, "most_power_w": 750, "celsius": 71}
    assert hardware.read("1", amd=True) == new
    assert hardware.read("0", True, "0000:c9:00.0") == new  # torch sees the second card alone, and calls it the first
    assert hardware.read("0", True, "0000:00:00.0") == {
        "clock_mhz": 1700, "memory_clock_mhz": 1600, "power_w": 128, "most_power_w": None, "celsius": None,
    }  # fmt: skip
    assert hardware.read("7", amd=True) is None
    del said["rocm-smi"]
    for wrapped in ([METRIC], {"gpu_data": [METRIC]}):
        said["amd-smi"] = json.dumps(wrapped)
        assert hardware.read("1", amd=True) == {
            "clock_mhz": 2100, "most_clock_mhz": 2100, "memory_clock_mhz": None, "power_w": 612, "celsius": 71,
        }  # fmt: skip
        assert hardware.read("0", amd=True) is None


@pytest.mark.parametrize("amd", [True, False])
def test_no_tool_and_a_tool_that_says_something_else(monkeypatch: pytest.MonkeyPatch, amd: bool) -> None:
    for outcome in (FileNotFoundError(), subprocess.TimeoutExpired("x", 5), "NVML: mismatch"):

        def run(*_: Any, outcome: Any = outcome, **__: Any) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return SimpleNamespace(stdout=outcome)

        monkeypatch.setattr(subprocess, "run", run)
        assert hardware.read("0", amd) is None


def test_the_clocks_are_read_while_work_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    on = fake.install(monkeypatch)
    monkeypatch.setattr(hardware, "read", lambda which, amd, bus: fake.log.append(f"read {which}"))
    on.under_load(lambda: fake.log.append("call"), 0.4)
    assert fake.log == ["call", "call", "call", "read 0", "wait"]
    assert Cpu().under_load(lambda: None, 0.4) is None


# --- Launches --------------------------------------------------------------------------------------------------------


def compiled(handle: int, registers: int, keys: int) -> Any:
    source = SimpleNamespace(fn=SimpleNamespace(arg_names=["q", "KEYS", "q_d"]), constants={(1,): keys, (2,): 1})
    told = SimpleNamespace(num_warps=4, num_stages=3, shared=81920)
    return SimpleNamespace(function=handle, metadata=told, n_regs=registers, n_spills=0, src=source)


def test_the_kernels_that_a_call_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    hook = knobs.runtime.launch_enter_hook
    caches = {0: ({"a": compiled(7, 250, 64), "b": compiled(8, 128, 16)}, None, None)}
    ours = SimpleNamespace(attend_kernel=SimpleNamespace(device_caches=caches), few_kernel=SimpleNamespace())
    monkeypatch.setattr(interpret, "kernels", lambda interpreted: ours)

    def call() -> None:
        for handle in (7, 7, 99):  # one of somebody else's
            hook(SimpleNamespace(get=lambda handle=handle: {"function": handle}))

    assert launched.by(call) == [
        {"kernel": "attend_kernel", "launches": 2, "num_warps": 4, "num_stages": 3, "shared_bytes": 81920,
         "registers": 250, "spills": 0, "sizes": {"KEYS": 64}}
    ]  # fmt: skip
    assert not hook.calls  # taken off again
    assert launched.by(lambda: None) == []
