"""Clocks, power and temperature, as the vendor's own tool says them. Without the tool nothing is recorded."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from ...spine.results import Facts

NVIDIA = {
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "most_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "power.limit": "most_power_w",
    "temperature.gpu": "celsius",
}
# Why clocks are held back: drivers since 535 know the first name, older ones the second. A name that a driver does not
# know fails the whole query, so it is asked for by itself.
HELD_BACK = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
REASONS = {  # the bits of NVML's nvmlClocksEventReasons
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
ROCM_SMI = ("rocm-smi", "--showclocks", "--showpower", "--showmaxpower", "--showtemp", "--showbus", "--json")
# Of a card: newer releases call power and temperature otherwise than older ones. Clocks read "(2100Mhz)".
CARD = {
    "clock_mhz": ("sclk clock speed:",),
    "memory_clock_mhz": ("mclk clock speed:",),
    "power_w": ("Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)"),
    "most_power_w": ("Max Graphics Package Power (W)",),
    "celsius": ("Temperature (Sensor junction) (C)", "Temperature (Sensor edge) (C)"),
}
AMD_SMI = ("amd-smi", "metric", "--power", "--clock", "--temperature", "--json")
METRIC = {
    "clock_mhz": ("clock", "gfx_0", "clk"),
    "most_clock_mhz": ("clock", "gfx_0", "max_clk"),
    "memory_clock_mhz": ("clock", "mem_0", "clk"),
    "power_w": ("power", "socket_power"),
    "celsius": ("temperature", "hotspot"),
}
SECONDS = 5.0


def _say(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _number(text: object) -> float | None:
    """The first number in it; None for "[N/A]", "[Not Supported]" and the like."""
    found = re.search(r"-?\d+(?:\.\d+)?", str(text))
    return float(found[0]) if found else None


def _json(text: str | None) -> Any:
    """What the tool says between its warnings, which go to stdout as well; None if nothing."""
    starts = [at for at in (text.find("{"), text.find("[{")) if at >= 0] if text else []
    if text is None or not starts:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[min(starts) :])[0]
    except ValueError:
        return None


def _nvidia(which: str) -> Facts | None:
    def ask(fields: str) -> list[str]:
        said = _say("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", which)
        return [] if said is None else [value.strip() for value in said.strip().split(",")]

    values = ask(",".join(NVIDIA))
    if len(values) != len(NVIDIA):
        return None
    found: Facts = {name: _number(value) for name, value in zip(NVIDIA.values(), values, strict=True)}
    active = next((said[0] for name in HELD_BACK if (said := ask(name)) and said[0].startswith("0x")), None)
    if active is not None:
        bits = int(active, 16)
        found["held_back_by"] = [reason for bit, reason in REASONS.items() if bits & bit]
    return found


def _amd(which: str, bus: str | None) -> Facts | None:
    """By the place on the PCI bus where it is known: tools number all cards, torch those that it may see."""
    cards = _json(_say(*ROCM_SMI))
    if isinstance(cards, dict):
        on_bus = [c for c in cards.values() if bus and isinstance(c, dict) and str(c.get("PCI Bus")).lower() == bus]
        card = on_bus[0] if on_bus else cards.get(f"card{which}")
        if isinstance(card, dict):
            return {x: _number(next((card[k] for k in keys if k in card), None)) for x, keys in CARD.items()}
    metrics = _json(_say(*AMD_SMI))
    if isinstance(metrics, dict):  # a list by itself before ROCm 7
        metrics = metrics.get("gpu_data")
    for one in metrics if isinstance(metrics, list) else []:
        if isinstance(one, dict) and str(one.get("gpu")) == which:
            return {x: _number(_inside(one, keys)) for x, keys in METRIC.items()}
    return None


def _inside(value: Any, keys: tuple[str, ...]) -> object:
    """Numbers are `{"value": 9, "unit": "W"}`, or "N/A"."""
    for key in (*keys, "value"):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def read(which: str, amd: bool, bus: str | None = None) -> Facts | None:
    """Of one device, by its number or identity (AMD: number, and `bus` as in "0000:c9:00.0"); None where nothing can be
    asked."""
    return _amd(which, bus) if amd else _nvidia(which)
