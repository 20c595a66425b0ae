"""Clocks, power and temperature, as the vendor's own tool says them. Without the tool nothing is recorded."""

from __future__ import annotations

import json
import subprocess

from ...spine.results import Facts

NVIDIA = {
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "most_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "power.limit": "most_power_w",
    "temperature.gpu": "celsius",
    "clocks_throttle_reasons.active": "throttled",
}
AMD = ("rocm-smi", "--showclocks", "--showpower", "--showtemp", "--json")
SECONDS = 5.0


def _say(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _number(text: str) -> float | str | None:
    text = text.strip()
    try:
        return float(text)
    except ValueError:
        return None if text.startswith("[") or text == "N/A" else text  # "[N/A]", "[Not Supported]"


def read(which: str, amd: bool) -> Facts | None:
    """Of one device, by its number or identity; None where nothing can be asked."""
    if amd:
        said = _say(*AMD)
        try:
            return None if said is None else dict(json.loads(said))
        except ValueError:
            return None
    said = _say("nvidia-smi", f"--query-gpu={','.join(NVIDIA)}", "--format=csv,noheader,nounits", "-i", which)
    values = [] if said is None else said.strip().split(",")
    if len(values) != len(NVIDIA):
        return None
    return {name: _number(value) for name, value in zip(NVIDIA.values(), values, strict=True)}
