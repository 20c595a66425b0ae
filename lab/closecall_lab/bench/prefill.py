"""The whole prefill of a model: as it is, attached with our kernel run dense, and attached with each policy."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closecall.backends import cpu
from closecall.hf.attach import Handle, attach
from closecall.models.load import LoadedModel
from closecall.policy import Policy

from ..spine import inputs
from ..spine.results import Facts
from ..spine.stopwatch import stopwatch
from ..spine.table import Table
from ..spine.timing import LEAST_ROUNDS, Contender, Samples, interleave
from . import prefill_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNATTACHED = "unattached"
Summary = dict[str, float | None]


@dataclass(frozen=True)
class PrefillBench:
    """Every context and thread count is a cell; the unattached model and all policies take turns in it."""

    loaded: LoadedModel
    contexts: tuple[int, ...]
    policies: tuple[Policy, ...]
    threads: tuple[int, ...]
    repeats: int
    seconds: float
    name: str = "prefill"

    def __post_init__(self) -> None:
        most = self.loaded.context
        if most is not None and min(self.contexts) > most:
            raise ValueError(
                f"{self.loaded.name} was trained on {most} tokens, and every context asked for is longer: "
                f"ask for at most --context {most}"
            )

    @property
    def warnings(self) -> list[str]:
        """Contexts that are not measured: past its training a model is no model, and its attention looks different."""
        longer = self.loaded.longer_than_trained(self.contexts)
        if not longer:
            return []
        most, listed = self.loaded.context, ", ".join(map(inputs.size, longer))
        return [f"Warning: {self.loaded.name} was trained on {most} tokens, so these were not run: {listed}."]

    def cells(self) -> list[Facts]:
        import transformers

        loaded = self.loaded
        shared = {
            "model": loaded.label,
            "fingerprint": loaded.fingerprint,
            "dtype": inputs.dtype_name(loaded.model.dtype),
            "device": str(loaded.model.device),
            "unattached": loaded.model.config._attn_implementation,
            "transformers": transformers.__version__,
            "policies": [p.to_json() for p in self.policies],
            "tier": cpu.tier() if cpu.tiers() else None,
            "repeats": self.repeats,
            "seconds": self.seconds,
        }
        most = loaded.context or math.inf
        return [
            {"context": n, "threads": threads, **shared}
            for n in sorted(self.contexts)
            if n <= most
            for threads in self.threads
        ]

    def label(self, cell: Facts) -> str:
        return f"{inputs.size(cell['context'])} {cell['dtype']}, {inputs.threads(cell['threads'])}"

    def guess(self, cell: Facts) -> float:
        config = self.loaded.model.config.get_text_config()
        attention = 2 * getattr(config, "hidden_size", 0) * getattr(config, "num_hidden_layers", 0) * cell["context"]
        once: float = 2 * (self.loaded.model.num_parameters() + attention) * cell["context"] / (80e9 * cell["threads"])
        return max(self.seconds, LEAST_ROUNDS * once * (1 + len(self.policies)))

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        model = self.loaded.model
        ids = _prompt(model, cell["context"])
        told: dict[str, Handle] = {}
        contenders = [
            Prefill(UNATTACHED, {}, cell["threads"], lambda: _unattached(model, ids)),
            *(Prefill(p.name, {}, cell["threads"], _attached(model, ids, p, told)) for p in self.policies),
        ]
        samples = interleave(contenders, seconds=self.seconds, most_rounds=self.repeats)
        return {
            "rounds": samples.rounds,
            "unattached": {
                "seconds": samples.median(UNATTACHED),
                "attention_seconds": samples.median(UNATTACHED, "attention"),
                "attention_share": samples.share(UNATTACHED, "attention"),
            },
            "ours": {p.name: _row(p.name, samples) | summary(told[p.name]) for p in self.policies},
            "extra_mib": {name: None if x is None else x / 2**20 for name, x in samples.extra_bytes.items()},
        }

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table:
        return prefill_report.table(machine, measured, self.policies, self.warnings)

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Figure]:
        return prefill_report.figures(machine, measured, self.policies)


@dataclass(frozen=True)
class Prefill(Contender):
    """One prefill, in two parts: attention, and everything else."""

    timed: Callable[[], tuple[float, float]]

    def run(self) -> tuple[dict[str, float], Any]:
        wall, attention = self.timed()
        return {"attention": attention, "rest": wall - attention}, None


def _prompt(model: Any, context: int) -> Tensor:
    generator = torch.Generator().manual_seed(inputs.SEED)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (1, context), generator=generator).to(model.device)


def _wall(model: Any, ids: Tensor) -> float:
    """One call as `generate` makes it for a prompt: with a cache, and logits of the last token only."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        begin = time.perf_counter()
        model(ids, use_cache=True, **options)
        return time.perf_counter() - begin


def _unattached(model: Any, ids: Tensor) -> tuple[float, float]:
    with stopwatch(model) as watch:
        wall = _wall(model, ids)
    return wall, watch.seconds


def _attached(model: Any, ids: Tensor, p: Policy, told: dict[str, Handle]) -> Callable[[], tuple[float, float]]:
    def timed() -> tuple[float, float]:
        # People attach once and call often, so attaching is not part of a prefill's time. What every call pays for
        # being attached is: all that our function does beyond selecting and attending counts as the rest.
        with attach(model, p) as handle:
            wall = _wall(model, ids)
        told[p.name] = handle
        layers = handle.stats().values()
        return wall, sum(layer["select_seconds"] + layer["attend_seconds"] for layer in layers)

    return timed


def summary(handle: Handle) -> Summary:
    """What the last prefill kept, over all layers that left something out; None where none did."""

    def mean(key: str) -> float | None:
        known = [value for layer in handle.stats().values() if not math.isnan(value := float(layer[key]))]
        return statistics.fmean(known) if known else None

    return {key: mean(key) for key in ("effective_budget", "kept_fraction", "trigger_rate")}


def _row(name: str, samples: Samples) -> Summary:
    wall, attention = samples.seconds(name), samples.seconds(name, "attention")
    rest = samples.seconds(UNATTACHED, "rest")
    # Amdahl: only attention got faster, everything else takes what it takes the unattached model.
    bound = [r + a for r, a in zip(rest, attention, strict=True)]
    return {
        "seconds": samples.median(name),
        "attention_seconds": samples.median(name, "attention"),
        "attention_share": samples.share(name, "attention"),
        "over_unattached": samples.ratio(name, UNATTACHED),
        "over_dense": samples.ratio(name, "dense"),
        "bound_over_unattached": _median_ratio(bound, samples.seconds(UNATTACHED)),
        "over_bound": _median_ratio(wall, bound),
    }


def _median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
