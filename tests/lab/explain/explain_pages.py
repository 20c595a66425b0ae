"""What the tests of the page have in common: a browser as far as they need it, and small policies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import closecall
from closecall.policy import parse
from closecall_lab.explain.page import Explanation

CONTEXT = 1280  # 20 blocks and tiles
BUDGET = 3  # tiles keep 6 of them


@dataclass(frozen=True)
class Loaded:
    """A probe as the page wants it: a model with its tokenizer."""

    model: Any
    tokenizer: Any
    own_name: str = "probe"
    context: int = 36864


def policies(*names: str) -> list[tuple[str, closecall.Policy]]:
    """By their names on the page: presets at the tests' budget, under long names as people type them."""
    listed = [name if name == "dense" else f"{name}:budget={BUDGET}" for name in names]
    return [(name, parse(name)) for name in listed]


Explain = Callable[..., Explanation]


class Browser:
    """Chromium, as far as the tests need it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, path: Path, address: str = "") -> None:
        """A page from disk, ready to be looked at."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri() + address)
        self.until("return document.documentElement.dataset.ready === 'yes'")
        self.settle()

    def until(self, script: str) -> None:
        end = time.monotonic() + 20
        while not self.run(script):
            assert time.monotonic() < end, f"never came true: {script}; {self.complaints()}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Waits until everything that a change touches is drawn: unpacking takes a few turns of the event loop."""
        self.driver.execute_async_script(
            "const done = arguments[0]; setTimeout(() => requestAnimationFrame(done), 80);"
        )

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def key(self, key: str) -> None:
        self.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))", key)
        self.settle()

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(n => n.textContent)", selector))

    def picture(self, selector: str) -> str:
        """What a canvas shows."""
        return str(self.run("return document.querySelector(arguments[0]).toDataURL()", selector))

    def state(self) -> dict[str, Any]:
        return dict(self.run("return {...state}"))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
