"""What `closecall gpu-model` prints: first the model's error on published figures, then what it predicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.inputs import size, three_digits
from ..bench.table import Column, Table
from ..policy import Policy
from . import model, published
from .compile import Compiler, Facts
from .devices import Device
from .model import LABEL, Occupancy, Prediction, predict
from .shapes import Shape

JSON_VERSION = 1
DTYPE = "bf16"


def _occupancy(facts: Facts) -> Occupancy:
    if problems := facts.problems():
        raise ValueError(f"{facts.name} for {facts.arch} cannot be modelled: {', '.join(problems)}")
    return Occupancy(facts.resident_blocks, bool(facts.pipelined), facts.rows or 64, facts.keys or 64)


def _wanted(shape: Shape) -> str:
    return f"attend D{shape.head_dim} {DTYPE}"


def occupancy_from(path: Path, archs: Sequence[str], shape: Shape) -> dict[str, Occupancy]:
    """From a file that `closecall gpu-report --json` wrote."""
    try:
        rows = json.loads(path.read_text())["variants"]
        found = {row["arch"]: Facts.from_dict(row) for row in rows if row["name"] == _wanted(shape)}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report: write one with `closecall gpu-report --json {path}`") from error
    for arch in archs:
        if arch not in found:
            raise ValueError(f"{path} has no {_wanted(shape)!r} for {arch}: report it with closecall gpu-report")
    return {arch: _occupancy(found[arch]) for arch in archs}


def occupancy_now(archs: Sequence[str], shape: Shape) -> dict[str, Occupancy]:
    """Compiled here, or remembered from the last time."""
    with Compiler() as compiler:
        return {arch: _occupancy(compiler.facts(arch, _wanted(shape))) for arch in archs}


@dataclass(frozen=True)
class Case:
    """One device and context: the same prefill run five ways."""

    sdpa: Prediction
    flash3: Prediction | None  # where dense attention has a faster kernel than SDPA's
    paper: Prediction
    ours: Prediction
    cautious: Prediction

    def row(self) -> dict[str, Any]:
        dense = self.sdpa.prefill_ms
        return {
            "device": self.sdpa.device.name,
            "context": self.sdpa.context,
            "kept": self.ours.work.kept / self.ours.work.visible,
            "dense_layer": self.sdpa.attention_ms,
            "paper_layer": self.paper.attention_ms,
            "ours_layer": (self.ours.attention_ms, self.cautious.attention_ms),
            "dense_prefill": dense,
            "ours_prefill": (self.ours.prefill_ms, self.cautious.prefill_ms),
            "paper_wall": self.paper.prefill_ms / dense,
            "ours_wall": (self.ours.prefill_ms / dense, self.cautious.prefill_ms / dense),
            "flash3_wall": None
            if self.flash3 is None
            else tuple(p.prefill_ms / self.flash3.prefill_ms for p in (self.ours, self.cautious)),
        }

    def to_dict(self) -> dict[str, Any]:
        ways = {"sdpa": self.sdpa, "flash3": self.flash3, "paper": self.paper, "ours": self.ours}
        ways["ours_cautious"] = self.cautious
        return {name: None if p is None else p.to_dict() for name, p in ways.items()}


@dataclass(frozen=True)
class Model:
    """Everything one call of the command says."""

    shape: Shape
    policy: Policy
    occupancy: Mapping[str, Occupancy]
    cases: Sequence[Case]

    def to_dict(self) -> dict[str, Any]:
        return {
            "closecall_gpu_model": JSON_VERSION,
            "label": LABEL,
            "published": [f.to_dict() for f in published.check()],
            "held_out_error": _held_out(),
            "shares": published.fitted().to_dict(),
            "assumed": list(model.ASSUMED),
            "model": self.shape.name,
            "policy": json.loads(self.policy.to_json()),
            "occupancy": {arch: found.to_dict() for arch, found in self.occupancy.items()},
            "cases": [case.to_dict() for case in self.cases],
        }


def build(
    shape: Shape,
    policy: Policy,
    chosen: Sequence[Device],
    contexts: Sequence[int],
    occupancy: Mapping[str, Occupancy],
) -> Model:
    shares = published.fitted()
    cases = []
    for where in chosen:
        for context in contexts:
            dense = predict(shape, where, context, published.DENSE, "sdpa", shares)
            faster = predict(shape, where, context, published.DENSE, "sdpa", shares.flash3())
            paper = dense if policy.scorer is None else predict(shape, where, context, policy, "paper", shares)
            ends = [
                predict(shape, where, context, policy, "ours", s, occupancy[where.arch])
                for s in (shares, shares.cautious())
            ]
            cases.append(Case(dense, faster if faster.prefill_ms < dense.prefill_ms else None, paper, *ends))
    return Model(shape, policy, occupancy, cases)


def _held_out() -> float:
    return published.mean_error([f for f in published.check() if f.role == "held out"])


def _number(figure: dict[str, Any], key: str) -> str:
    formats = {"": "{:.0%}", "x": "{:.2f} x"}
    return formats.get(figure["unit"], f"{three_digits(figure[key])} {figure['unit']}").format(figure[key])


ERROR_COLUMNS = (
    Column("published figure", lambda r: r["name"], left=True),
    Column("role", lambda r: r["role"], left=True),
    Column("published", lambda r: _number(r, "published")),
    Column("modelled", lambda r: _number(r, "modelled")),
    Column("error", lambda r: r["error"], "+.1%"),
)


def errors() -> Table:
    shares = published.fitted()
    figures = published.check()
    worst = max((f for f in figures if f.role == "held out"), key=lambda f: abs(f.error))
    notes = [
        f"Held out, {sum(f.role == 'held out' for f in figures)} figures: mean error {_held_out():.1%}, "
        f"worst {worst.error:+.1%} ({worst.name}).",
        "Fitted, one figure each: "
        f"dense attention on the A100 {shares.dense['sm_80']:.0%} of the tensor peak (463 ms), "
        f"linear layers {shares.linear:.0%} (share at 128K), "
        f"the paper's kernel {shares.paper_kernel:.0%} of dense attention's rate (121 ms), "
        f"its selection {shares.paper_passes:.1f} passes over its scores (69 ms), "
        f"Qwen3.6 outside attention {shares.mixed:.1%} (share at 64K).",
        "Implied: follows from fitted figures, so it tests only that they agree with each other.",
        "The published figures test the parts that speak of dense attention, of the rest of a layer and of the paper's "
        "code. No published figure tests what is said of our kernels.",
        f"{shares.dense['sm_80']:.0%} is more than FlashAttention-2's authors report on an A100 (at most 73%): the "
        "paper's prompts may have been shorter than their name says. The fit carries that into every prediction.",
        *(f"Assumed: {text}." for text in model.ASSUMED),
    ]
    return Table("How far the model is from the paper's published times", ERROR_COLUMNS,
                 [f.to_dict() for f in figures], notes)  # fmt: skip


def _ends(spec: str, scale: float = 1.0) -> Any:
    def show(pair: tuple[float, float] | None) -> str | None:
        return None if pair is None else " to ".join(format(x * scale, spec) for x in pair)

    return show


COLUMNS = (
    Column("device", lambda r: r["device"], left=True),
    Column("context", lambda r: size(r["context"])),
    Column("kept", lambda r: r["kept"], ".0%"),
    Column("SDPA ms", lambda r: three_digits(r["dense_layer"])),
    Column("paper's ms", lambda r: three_digits(r["paper_layer"])),
    Column("ours ms", lambda r: _ends(".1f")(r["ours_layer"])),
    Column("SDPA prefill s", lambda r: three_digits(r["dense_prefill"] / 1e3)),
    Column("ours prefill s", lambda r: _ends(".2f", 1e-3)(r["ours_prefill"])),
    Column("paper's wall", lambda r: r["paper_wall"], ".2f"),
    Column("our wall", lambda r: _ends(".2f")(r["ours_wall"])),
    Column("our wall, FA3", lambda r: _ends(".2f")(r["flash3_wall"])),
)


def _facts(device: Device) -> str:
    assumed = "".join(f" Assumed: {text}." for text in device.assumed)
    return (
        f"{device.name}: {device.tensor_tflops:g} TFLOP/s, {device.bandwidth:g} TB/s, L2 {device.l2_bandwidth:.1f} "
        f"TB/s, {device.multiprocessors} multiprocessors ({'; '.join(device.sources)}).{assumed}"
    )


def predictions(found: Model) -> Table:
    shape = found.shape
    notes = [
        str(found.policy),
        "ms: selection and attention of one full-attention layer. prefill: all layers, one prompt, bf16. wall: over "
        "SDPA's; FA3: over dense attention by FlashAttention-3.",
        "ours: from kernels that reach of their bound what dense attention reaches of its own on the A100, to kernels "
        "that reach only what the paper's did.",
        *(
            f"{arch}: {o.blocks} thread block{'s' if o.blocks > 1 else ''} of {_wanted(shape)} per multiprocessor, "
            f"{o.rows} x {o.keys} a turn, {'pipelined' if o.pipelined else 'not pipelined'} (closecall gpu-report)."
            for arch, o in found.occupancy.items()
        ),
    ]
    notes += [
        f"{shape.name}: {shape.full_layers} of {shape.layers} layers with softmax attention, {shape.q_heads} query and "
        f"{shape.kv_heads} key heads of {shape.head_dim}, hidden size {shape.hidden}, {shape.weights / 1e9:.2f}B "
        f"weights for a token ({'; '.join(shape.sources)}).",
        *dict.fromkeys(_facts(case.sdpa.device) for case in found.cases),
    ]
    if shape.mixed:
        notes.append(
            "Whether it fits into a device's memory is not looked at; by the paper it does not into an A100's."
        )
    title = f"{found.shape.name}, {found.policy.name}: {LABEL}"
    return Table(title, COLUMNS, [case.row() for case in found.cases], notes)


def _parts(case: Case) -> list[dict[str, Any]]:
    dense = case.sdpa.layer[-1]
    return [
        {"device": p.device.name, "context": p.context, "way": way, "part": c.name, "ms": c.ms, "bound": c.bound}
        for way, p, own in (("SDPA", case.sdpa, [dense]), ("ours", case.ours, case.ours.layer))
        for c in own
    ]


PART_COLUMNS = (
    Column("device", lambda r: r["device"], left=True),
    Column("context", lambda r: size(r["context"])),
    Column("part", lambda r: r["part"], left=True),
    Column("ms", lambda r: three_digits(r["ms"])),
    Column("bound by", lambda r: r["bound"], left=True),
)


def components(found: Model) -> Table:
    """Of the longest context on every device."""
    longest = max(case.sdpa.context for case in found.cases)
    rows = [row for case in found.cases if case.sdpa.context == longest for row in _parts(case)]
    notes = ["Our kernels at the faster end. dense attention: what SDPA does in place of the parts below it."]
    return Table(f"Where a layer's time goes, {found.shape.name}: {LABEL}", PART_COLUMNS, rows, notes)


def _tables(found: Sequence[Model]) -> list[Table]:
    """The errors first: nobody should read a prediction without them."""
    return [errors(), *(table for each in found for table in (predictions(each), components(each)))]


def text(found: Sequence[Model]) -> str:
    return "\n\n".join(table.text() for table in _tables(found))


def markdown(found: Sequence[Model], command: str) -> str:
    """The whole page that `--markdown FILE` writes."""
    return "\n".join(
        [
            "# GPU times: " + LABEL,
            "",
            f"Written by `{command}`.",
            "",
            "No GPU was used. Each component takes the longest of its bounds (tensor cores, memory, L2, exponentials),",
            "reached to a stated share, plus its launches; the attention kernel's occupancy is the",
            "[compile report](gpu_report.md)'s. First the model is held against the paper's published times, then it",
            "predicts. What a GPU really does, `closecall validate --device cuda` tells.",
            "",
            *(table.markdown().replace("# ", "## ", 1) for table in _tables(found)),
        ]
    )
