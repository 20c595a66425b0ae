"""Selection and attention over a whole prompt, against torch SDPA, our own kernel run dense, and FlexAttention."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closecall import attend, attention, select
from closecall.api import covers_everything
from closecall.backends import cpu, flex
from closecall.checks import check_scale
from closecall.geometry import Geometry, plan
from closecall.info import DTYPES
from closecall.policy import Policy, policy
from closecall.selection import Selection

from ..spine import inputs
from ..spine.results import Facts
from ..spine.table import Table
from ..spine.timing import LEAST_ROUNDS, Contender, Samples, interleave
from . import attention_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("sdpa", "dense", "flex")
PROBE_SECONDS = 0.02
DENSE = policy("dense")


@dataclass(frozen=True)
class AttentionBench:
    """Every combination of contexts, types, dims and thread counts is a cell; all policies run in each."""

    contexts: tuple[int, ...]
    dtypes: tuple[str, ...]
    dims: tuple[int, ...]
    threads: tuple[int, ...]
    policies: tuple[Policy, ...]
    baselines: tuple[str, ...]
    heads: int
    kv_heads: int
    repeats: int
    seconds: float
    name: str = "attention"

    def cells(self) -> list[Facts]:
        shared = {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "policies": [p.to_json() for p in self.policies],
            "baselines": list(self.baselines),
            "tier": cpu.tier() if cpu.tiers() else None,
            "repeats": self.repeats,
            "seconds": self.seconds,
        }
        return [
            {"context": n, "dtype": dtype, "dim": dim, "threads": threads, **shared}
            for n in sorted(self.contexts)
            for threads in self.threads
            for dim in self.dims
            for dtype in self.dtypes
        ]

    def label(self, cell: Facts) -> str:
        return f"{inputs.size(cell['context'])} {cell['dtype']} D={cell['dim']}, {inputs.threads(cell['threads'])}"

    def guess(self, cell: Facts) -> float:
        dense: float = 2 * cell["heads"] * cell["context"] ** 2 * cell["dim"] / (80e9 * cell["threads"])
        round_seconds = dense * (1 + len(cell["baselines"]) / 3)
        return 5 + max(float(cell["seconds"]), LEAST_ROUNDS * round_seconds)

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        shape = (cell["heads"], cell["kv_heads"], cell["context"], cell["context"], cell["dim"])
        return _Cell(self, cell, *inputs.qkv(*shape, cell["dtype"])).measure()

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table:
        return attention_report.table(machine, measured, self.policies)

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Figure]:
        return attention_report.figures(machine, measured, self.policies)


@dataclass(frozen=True, eq=False)
class _Cell:
    bench: AttentionBench
    cell: Facts
    q: Tensor
    k: Tensor
    v: Tensor

    def measure(self) -> Facts:
        threads = self.cell["threads"]
        policies = [*([DENSE] if "dense" in self.bench.baselines else []), *self.bench.policies]
        kept = {p.name: self._kept(p) for p in policies}
        contenders = [self._ours(p, kept[p.name], threads) for p in policies]
        if threads > 1:
            contenders += [self._ours(p, kept[p.name], 1, " on one thread") for p in self.bench.policies]
        facts: Facts = {}
        if "sdpa" in self.bench.baselines:
            facts["sdpa_form"], call = inputs.sdpa(self.q, self.k, self.v)
            contenders.insert(0, Contender.of("sdpa", call, threads))
        if "flex" in self.bench.baselines:
            try:
                contenders += self._flex(kept, threads)
            except RuntimeError as error:  # no compiler, say: the other contenders still have something to tell
                facts["flex_problem"] = str(error).strip().splitlines()[0]
        probe = self._probe()
        samples = interleave(contenders, seconds=self.bench.seconds, most_rounds=self.bench.repeats, probe=probe)
        facts |= {
            "rounds": samples.rounds,
            "peak_gflops": statistics.median(samples.probes) / 1e9 if probe else None,
            "ms": {name: 1000 * samples.median(name) for name in samples.laps},
            "extra_mib": {
                name: None if extra is None else extra / 2**20 for name, extra in samples.extra_bytes.items()
            },
        }
        return facts | {"ours": {p.name: self._row(p, kept[p.name], samples, probe is not None) for p in policies}}

    def _geometry(self, p: Policy) -> Geometry:
        return plan(1, self.q.shape[2], self.k.shape[2], p.block, p.tile)

    def _kept(self, p: Policy) -> Selection | None:
        return None if covers_everything(p, self._geometry(p)) else select(self.q, self.k, p)

    def _ours(self, p: Policy, kept: Selection | None, threads: int, suffix: str = "") -> Contender:
        if kept is None:
            return Contender.of(p.name + suffix, lambda: attention(self.q, self.k, self.v, p), threads)
        steps: dict[str, Callable[..., object]] = {
            "select": lambda _: select(self.q, self.k, p),
            "attend": lambda selection: attend(self.q, self.k, self.v, selection),
        }
        return Contender(p.name + suffix, steps, threads)

    def _flex(self, kept: dict[str, Selection | None], threads: int) -> list[Contender]:
        torch.compiler.reset()  # every cell is another shape, and torch stops compiling after a few
        found = []
        for p in self.bench.policies:
            scale = check_scale(None, self.q.shape[3])
            run = flex.compiled(self.q, self.k, self.v, kept[p.name], self._geometry(p), scale)
            found.append(Contender.of(f"flex {p.name}", run, threads))
        return found

    def _probe(self) -> Callable[[], float] | None:
        return None if cpu.why_not(self.q) else lambda: cpu.peak(DTYPES[self.cell["dtype"]], PROBE_SECONDS)

    def _row(self, p: Policy, kept: Selection | None, samples: Samples, has_peak: bool) -> Facts:
        name, flex_name, single = p.name, f"flex {p.name}", f"{p.name} on one thread"
        step = None if kept is None else "attend"
        geometry = self._geometry(p)
        heads, dim, value_dim = self.q.shape[1], self.q.shape[3], self.v.shape[3]
        work = inputs.flops(kept, geometry, heads, dim, value_dim)
        rates = [work / t for t in samples.seconds(name, step)]
        shares = [r / (peak * self.cell["threads"]) for r, peak in zip(rates, samples.probes, strict=True) if peak]
        whole = inputs.flops(None, geometry, heads, dim, value_dim)
        return {
            "select_ms": 0.0 if kept is None else 1000 * samples.median(name, "select"),
            "select_share": 0.0 if kept is None else samples.share(name, "select"),
            "vs_sdpa": samples.ratio("sdpa", name),
            "vs_dense": samples.ratio("dense", name),
            "attend_vs_flex": samples.ratio(flex_name, name, step),
            "one_thread_over_all": samples.ratio(single, name),
            "gflops": statistics.median(rates) / 1e9,
            "share_of_peak": statistics.median(shares) if has_peak else None,
            # What the kernel does when nothing disturbs it: best round against the best that the core showed.
            "best_share_of_peak": max(rates) / (max(samples.probes) * self.cell["threads"]) if has_peak else None,
            "kept": work / whole,
            "effective_budget": None if kept is None else kept.effective_budget,
        }
