"""What the plugin did: sums over layers and steps, in the log every ten seconds and, where asked, for Prometheus."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily
from torch import Tensor
from vllm.logger import init_logger

from ..selection import Selection

logger = init_logger("vllm.closecall")
EVERY = 10.0  # seconds


@dataclass
class Totals:
    """Sums since the start."""

    kept: int = 0  # blocks, over heads and tiles
    visible: int = 0
    triggered: int = 0  # (head, tile) cells
    cut: int = 0
    prompt_rows: int = 0  # (row, layer) pairs
    dense_rows: int = 0
    seconds: float = 0.0  # in our attention
    vllm_seconds: float = 0.0  # in vLLM's, in layers that stay its

    def add(self, made: Selection | None, rows: int, seconds: float) -> None:
        """Adds a call's host-side figures. What `made` decided may be on a device: see `counted`."""
        self.seconds += seconds
        chosen = 0
        if made is not None:
            chosen = int(made.geometry.rows.sum())
            self.visible += int(made.geometry.visible.sum()) * made.counts.shape[1]
        self.prompt_rows += chosen
        self.dense_rows += rows - chosen

    def since(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, f) - getattr(other, f) for f in self.__dataclass_fields__))

    def line(self) -> str:
        kept = f"kept {self.kept / self.visible:.1%} of visible blocks" if self.visible else "nothing selected"
        fired = f", {self.triggered / self.cut:.1%} of cut tiles got more" if self.triggered and self.cut else ""
        return f"{kept}{fired}; {self.prompt_rows} sparse and {self.dense_rows} dense rows over all layers" + (
            f", {self.seconds:.2f} s in attention" if self.seconds else ""
        )


def counted(made: Selection) -> Tensor:
    """int64 `[3]`, where the selection is: kept blocks, triggered cells and cut ones."""
    return torch.stack([made.counts.sum(), made.triggered.sum(), (~made.margin.isnan()).sum()])


class Stats:
    """The totals of a worker. What is counted on a device stays there until somebody reads: nobody waits for it.

    Layers add and scrapes read from threads of their own, so one at a time.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._lock = threading.RLock()
        self._there: Tensor | None = None  # what `counted` says since the last reading
        self._logged, self._when = Totals(), time.monotonic()

    def add(self, made: Selection | None, rows: int, seconds: float) -> None:
        new = None if made is None else counted(made)
        with self._lock:
            self.totals.add(made, rows, seconds)
            if new is not None:
                self._there = new if self._there is None else self._there + new
            now = time.monotonic()
            if now - self._when >= EVERY and self.totals.prompt_rows > self._logged.prompt_rows:
                logger.info("closecall, last %.0f s: %s", now - self._when, self.read().since(self._logged).line())
                self._logged, self._when = Totals(**vars(self.totals)), now

    def add_vllm(self, seconds: float) -> None:
        """A call that vLLM's own attention computed."""
        with self._lock:
            self.totals.vllm_seconds += seconds

    def read(self) -> Totals:
        """A copy of the totals, with all that was counted."""
        with self._lock:
            there, self._there = self._there, None
            if there is not None:
                kept, triggered, cut = there.tolist()
                self.totals.kept += kept
                self.totals.triggered += triggered
                self.totals.cut += cut
            return Totals(**vars(self.totals))


class _Collector:
    NAMES: ClassVar[dict[str, str]] = {
        "kept": "Kept blocks, over heads and tiles of prompts",
        "visible": "Visible blocks, over heads and tiles of prompts",
        "triggered": "Heads of tiles that got more blocks than the others",
        "cut": "Heads of tiles in which something was left out",
        "prompt_rows": "Rows computed sparse, over layers",
        "dense_rows": "Rows computed dense in sparse layers: decoding, short prompts",
        "seconds": "Seconds in our attention",
        "vllm_seconds": "Seconds in vLLM's attention, in layers that stay its own",
    }

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def collect(self) -> list[CounterMetricFamily]:
        names, totals = self.NAMES.items(), self.stats.read()
        return [CounterMetricFamily(f"closecall_{n}", text, value=getattr(totals, n)) for n, text in names]


def serve_metrics(stats: Stats, port: int) -> None:
    registry = CollectorRegistry()  # of this worker alone: a process may have several engines
    registry.register(_Collector(stats))
    start_http_server(port, addr="127.0.0.1", registry=registry)
