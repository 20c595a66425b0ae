"""Times selection + attention over a whole prompt against torch SDPA, our own kernel run dense, and compiled
FlexAttention on the same blocks. Finished cells are kept: run the same command again to continue."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from closecall import attention, select
from closecall.api import covers_everything
from closecall.backends import cpu, flex
from closecall.checks import check_scale
from closecall.geometry import Geometry, plan
from closecall.info import DTYPES
from closecall.policy import Policy, policy
from closecall.selection import Selection

from ...eval.spec import Spec, split
from ...spine import inputs
from ...spine.numbers import mebibytes, threads, three_digits
from ...spine.options import each, one_of
from ...spine.results import Facts, Measured
from ...spine.table import Column, Table
from ...spine.timing import LEAST_ROUNDS, Contender, Samples, interleave
from .. import over_context
from ..base import Benchmark, TensorBenchmark, cell_columns, medians_note, select_then_attend, uncut, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("sdpa", "dense", "flex")
PROBE_SECONDS = 0.02


class Named(NamedTuple):
    """A policy and the text that asked for it: two of one preset may differ by an override."""

    name: str
    policy: Policy


DENSE = Named("dense", policy("dense"))


HELP = "selection + attention over whole prompts"
FULL = {"contexts": "4k,8k,16k,32k,64k,128k", "dims": "128,64", "threads": "1,all", "heads": "4", "kv_heads": "1",
        "budget": "33", "seconds": 20.0, "repeats": "15"}  # fmt: skip
QUICK = FULL | {"contexts": "2k,4k,8k,16k", "dims": "128", "threads": "1", "seconds": 4.0}


COLUMNS = (
    *cell_columns(),
    Column("policy", left=True),
    Column("SDPA ms", lambda r: r["sdpa_ms"] and three_digits(r["sdpa_ms"])),
    Column("ours ms", lambda r: three_digits(r["ms"])),
    Column("vs SDPA", "vs_sdpa", ".2f"),
    Column("vs our dense", "vs_dense", ".2f"),
    Column("vs Flex", "attend_vs_flex", ".2f"),
    Column("selection", "select_share", ".1%"),
    Column("kept", spec=".1%"),
    Column("GFLOP/s", "gflops", ".0f"),
    Column("of peak", "share_of_peak", ".0%"),
    Column("best round", lambda r: r.get("best_share_of_peak"), ".0%"),
    Column("extra MiB", "extra_mib", ".1f"),
    Column("scaling", "one_thread_over_all", ".2f"),
)
NOTES = (
    "vs SDPA, vs our dense: their time over ours (selection + attention); above 1 we are faster.",
    "vs Flex: compiled FlexAttention's time over our attention's on the same kept blocks, selection in neither.",
    "GFLOP/s: of the attention kernel, over the kept blocks. scaling: one thread's time over this row's.",
    "best round: the fastest round's GFLOP/s over the highest register peak seen; the median has the noise in it.",
)
SERIES = (
    over_context.Series("vs_sdpa", "torch SDPA", "#c2410c", "o"),
    over_context.Series("vs_dense", "our kernel, dense", "#1d4ed8", "s"),
    over_context.Series("attend_vs_flex", "FlexAttention,\nsame blocks", "#6b7280", "^"),
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        metavar="POLICY,...",
        default="router-on-quest",
        help="presets, and what differs: auto,auto:share=group (%(default)s)",
    )
    parser.add_argument(
        "--baselines", metavar="NAME,...", help="of sdpa, dense, flex (default all; with --quick no flex)"
    )


def make(args: argparse.Namespace, shared: dict[str, Any]) -> Benchmark:
    budget = shared.pop("budget")
    specs = [Spec.parse(text) for text in split(args.policies)]
    named = tuple(Named(str(s), s.policy(budget)) for s in specs if s.preset != "dense")
    if not named:
        raise ValueError(f"--policies names none that cuts: {args.policies!r}; dense is a baseline")
    baselines = args.baselines or ("sdpa,dense" if args.quick else "sdpa,dense,flex")
    return AttentionBench(
        policies=named,
        baselines=each("--baselines", baselines, one_of("--baselines", BASELINES)),
        **shared,
    )


@dataclass(frozen=True)
class AttentionBench(TensorBenchmark):
    """Every thread count is a cell too; all policies run in each."""

    policies: tuple[Named, ...]
    baselines: tuple[str, ...]
    name = "attention"
    threads_apart = True

    @property
    def warnings(self) -> list[str]:
        return uncut(self.policies, self.contexts)

    def shared(self) -> Facts:
        policies = [p.policy.to_json() for p in self.policies]
        return super().shared() | {"policies": policies, "baselines": list(self.baselines)}

    def guess(self, cell: Facts) -> float:
        dense: float = 2 * cell["heads"] * cell["context"] ** 2 * cell["dim"] / (80e9 * cell["threads"])
        round_seconds = dense * (1 + len(cell["baselines"]) / 3)
        return 5 + max(float(cell["seconds"]), LEAST_ROUNDS * round_seconds)

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        shape = (cell["heads"], cell["kv_heads"], cell["context"], cell["context"], cell["dim"])
        return _Cell(self, cell, *inputs.qkv(*shape, cell["dtype"])).measure()

    def table(self, machine: Facts, measured: Measured) -> Table:
        cell, _ = measured[0]
        peaks = sorted({f"{c['dtype']} {r['peak_gflops']:.0f}" for c, r in measured if r["peak_gflops"]})
        forms = sorted({r["sdpa_form"] for _, r in measured if "sdpa_form" in r})
        problems = sorted({r["flex_problem"] for _, r in measured if "flex_problem" in r})
        notes = [
            *(f"Warning: {w}" for w in self.warnings),
            *(str(policy) for _, policy in self.policies),
            *NOTES,
            medians_note(measured),
            *(
                [f"Register peak of one core, measured between the rounds: {', '.join(peaks)} GFLOP/s."]
                if peaks
                else []
            ),
            *([f"SDPA is torch's flash kernel, in its faster form: {' or '.join(forms)}."] if forms else []),
            *(f"No FlexAttention: {problem}" for problem in problems),
        ]
        return Table(f"Selection + attention: {where(machine, cell)}", COLUMNS, _rows(measured), notes, keys=5)

    def figures(self, machine: Facts, measured: Measured) -> dict[str, Figure]:
        """One figure per policy and thread count; the first policy on the fewest threads is `attention`."""
        rows = _rows(measured)
        counts = sorted({r["threads"] for r in rows})
        drawn = {}
        for name, p in self.policies:
            for n in counts:
                of_policy = [r for r in rows if r["policy"] == name and r["threads"] == n]
                more = [
                    *([name.replace(":", "-")] if name != self.policies[0][0] else []),
                    *([f"{n}t"] if n != counts[0] else []),
                ]
                drawn["-".join(["attention", *more])] = over_context.speedups(
                    title=f"How much faster is {name} on {threads(n)}?",
                    subtitle=f"selection + attention over a whole prompt; {where(machine, of_policy[0])}\n{p}",
                    rows=of_policy,
                    series=SERIES,
                    panels=("dtype", "dim"),
                )
        return drawn


def _rows(measured: Measured) -> list[dict[str, Any]]:
    return [
        cell
        | row
        | {
            "policy": name,
            "ms": result["ms"][name],
            "sdpa_ms": result["ms"].get("sdpa"),
            "extra_mib": result["extra_mib"][name],
        }
        for cell, result in measured
        for name, row in result["ours"].items()
    ]


@dataclass(frozen=True, eq=False)
class _Cell:
    bench: AttentionBench
    cell: Facts
    q: Tensor
    k: Tensor
    v: Tensor

    def measure(self) -> Facts:
        count = self.cell["threads"]
        policies = [*([DENSE] if "dense" in self.bench.baselines else []), *self.bench.policies]
        kept = {p.name: self._kept(p.policy) for p in policies}
        contenders = [self._ours(p, kept[p.name], count) for p in policies]
        if count > 1:
            contenders += [self._ours(p, kept[p.name], 1, " on one thread") for p in self.bench.policies]
        facts: Facts = {}
        if "sdpa" in self.bench.baselines:
            facts["sdpa_form"], call = inputs.sdpa(self.q, self.k, self.v)
            contenders.insert(0, Contender.of("sdpa", call, count))
        if "flex" in self.bench.baselines:
            try:
                contenders += self._flex(kept, count)
            except RuntimeError as error:  # no compiler, say: the other contenders still have something to tell
                facts["flex_problem"] = str(error).strip().splitlines()[0]
        probe = self._probe()
        samples = interleave(contenders, seconds=self.bench.seconds, most_rounds=self.bench.repeats, probe=probe)
        facts |= {
            "rounds": samples.rounds,
            "peak_gflops": statistics.median(samples.probes) / 1e9 if probe else None,
            "ms": {name: 1000 * samples.median(name) for name in samples.laps},
            "extra_mib": {name: mebibytes(extra) for name, extra in samples.extra_bytes.items()},
        }
        return facts | {"ours": {p.name: self._row(p, kept[p.name], samples, probe is not None) for p in policies}}

    def _geometry(self, p: Policy) -> Geometry:
        return plan(1, self.q.shape[2], self.k.shape[2], p.block, p.tile)

    def _kept(self, p: Policy) -> Selection | None:
        return None if covers_everything(p, self._geometry(p)) else select(self.q, self.k, p)

    def _ours(self, p: Named, kept: Selection | None, threads: int, suffix: str = "") -> Contender:
        if kept is None:
            return Contender.of(p.name + suffix, lambda: attention(self.q, self.k, self.v, p.policy), threads)
        return Contender(p.name + suffix, select_then_attend(self.q, self.k, self.v, p.policy), threads)

    def _flex(self, kept: dict[str, Selection | None], threads: int) -> list[Contender]:
        torch.compiler.reset()  # every cell is another shape, and torch stops compiling after a few
        contenders = []
        for p in self.bench.policies:
            scale = check_scale(None, self.q.shape[3])
            run = flex.compiled(self.q, self.k, self.v, kept[p.name], self._geometry(p.policy), scale)
            contenders.append(Contender.of(f"flex {p.name}", run, threads))
        return contenders

    def _probe(self) -> Callable[[], float] | None:
        return None if cpu.why_not(self.q) else lambda: cpu.peak(DTYPES[self.cell["dtype"]], PROBE_SECONDS)

    def _row(self, p: Named, kept: Selection | None, samples: Samples, has_peak: bool) -> Facts:
        name, flex_name, single = p.name, f"flex {p.name}", f"{p.name} on one thread"
        step = None if kept is None else "attend"
        geometry = self._geometry(p.policy)
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
