"""The checks find what is wrong: right backends pass, and backends broken in one place each do not."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import closecall
from closecall import backends
from closecall.backends import cpu, reference
from closecall.ranking import Ranked
from closecall_lab.bench.validate.cases import CASES, POLICIES, Case, laid_out, matching
from closecall_lab.bench.validate.check import WrongAnswerError, check, worst
from closecall_lab.bench.validate.device import Cpu


def the(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@dataclasses.dataclass
class Broken:
    """The reference with one part exchanged."""

    name = "broken"
    rank: Callable[..., Ranked] = reference.rank
    gather_kept: Callable[..., Tensor] = reference.gather_kept
    attend: Callable[..., tuple[Tensor, Tensor]] = reference.attend

    def why_not(self, q: Tensor) -> str | None:
        return None


def install(patch: pytest.MonkeyPatch, broken: Broken) -> str:
    patch.setattr(backends, "NAMES", (*backends.NAMES, "broken"))
    patch.setitem(backends.MODULES, "broken", "broken")
    patch.setitem(sys.modules, "closecall.backends.broken", broken)
    return "broken"


FEW = ["router-on-quest, fp32", "topk, bf16, exact scores with ties", "padded on the left", "packed", "decode, router",
       "heads that share, bf16"]  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "flex", *(["cpu"] if cpu.tiers() else [])])
@pytest.mark.parametrize("name", FEW)
def test_right_backends_pass(name: str, backend: str) -> None:
    facts = check(the(name), Cpu(), backend)
    assert facts["selection"]["other_tiles"] == 0
    for path in ("attend", "attention"):
        assert 0 <= facts[path]["out"]["used"] <= 1
        assert facts[path]["out"]["error"] <= facts[path]["out"]["budget"]
    if not facts["selection"]["exact"]:
        assert facts["selection"]["margin"]["used"] <= 1


def test_the_reference_left_unbroken_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests below would show nothing."""
    backend = install(monkeypatch, Broken())
    for name in {name for name, *_ in WRONG.values()}:
        check(the(name), Cpu(), backend)


def _nudged(part: int, at: tuple[int, ...], by: float) -> Callable[..., tuple[Tensor, Tensor]]:
    def attend(*args: Any) -> tuple[Tensor, Tensor]:
        both = reference.attend(*args)
        both[part][at] += by
        return both

    return attend


def _with_short_mantissas(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Products of 10-bit mantissas, as tensor cores make of float32 unless told otherwise."""
    q, k = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k))
    return reference.attend(q, k, *rest)


def _in_the_values_type(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The log-sum-exp rounded to the inputs' type."""
    out, lse = reference.attend(q, k, v, *rest)
    return out, lse.to(q.dtype).float()


def _unmasked_padding(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = reference.attend(*args)
    return out.masked_fill(lse.isneginf()[..., None], torch.nan), lse


def _later_ties(*args: Any) -> Ranked:
    """Ties go to the higher block index."""
    ranked = reference.rank(*args)
    scores, at = ranked.scores.flip(-1).sort(dim=-1, descending=True, stable=True)
    return dataclasses.replace(ranked, order=ranked.order.flip(-1).gather(-1, at), scores=scores)


def _one_worse_block(q: Tensor, k: Tensor, policy: Any, geometry: Any, scale: float, summaries: Any) -> Ranked:
    """In the last tile of head 0, the best unforced block changes places with the worst ranked one."""
    ranked = reference.rank(q, k, policy, geometry, scale)
    order = ranked.order.clone()
    last = int((order[0, 0, -1] < geometry.n_blocks).sum()) - 1
    order[0, 0, -1, 0], order[0, 0, -1, last] = order[0, 0, -1, last].clone(), order[0, 0, -1, 0].clone()
    return dataclasses.replace(ranked, order=order)


def _coarse_scores(q: Tensor, k: Tensor, *rest: Any) -> Ranked:
    """Keys rounded to bfloat16 before they are scored."""
    return reference.rank(q, k.bfloat16().float(), *rest)


def _other_margins(*args: Any) -> Ranked:
    ranked = reference.rank(*args)
    scores = ranked.scores.clone()
    scores[..., 0] *= 1.05
    return dataclasses.replace(ranked, scores=scores)


def _forgotten_sink(ranked: Ranked, counts: Tensor, geometry: Any, sinks: int, width: int) -> Tensor:
    """Block 1 in place of block 0, where block 1 is not kept anyway."""
    index = reference.gather_kept(ranked, counts, geometry, sinks, width)
    alone = (index[..., :1] == 0) & (index[..., 1:2] > 1) & (counts[..., None] > 1)
    return torch.cat([index[..., :1] + alone.to(torch.int32), index[..., 1:]], -1)


def _no_sentinels(*args: Any) -> Tensor:
    return reference.gather_kept(*args).clamp(max=args[2].n_blocks - 1)


WRONG: dict[str, tuple[str, Broken, str]] = {
    "one output": ("topk, fp32", Broken(attend=_nudged(0, (0, 1, 500, 3), 1e-3)), r"output at \[0, 1, 500, 3\] is off"),
    "one bf16 output": ("topk, bf16", Broken(attend=_nudged(0, (0, 1, 500, 3), 0.5)), "output at"),
    "one sum": ("topk, fp32", Broken(attend=_nudged(1, (0, 1, 500), 1e-3)), r"log-sum-exp at \[0, 1, 500\] is off"),
    "short mantissas": ("head dim 128, fp32", Broken(attend=_with_short_mantissas), "is off by"),
    "short sums": ("head dim 128, bf16", Broken(attend=_in_the_values_type), "log-sum-exp at"),
    "padding": ("padded on the left", Broken(attend=_unmasked_padding), "is nan, not 0.0"),
    "ties": ("topk, fp32, exact scores with ties", Broken(rank=_later_ties), "kv_idx.*the reference has"),
    "a worse block": ("topk, fp32", Broken(rank=_one_worse_block), "a dropped block's lead over a kept one"),
    "coarse scores": ("topk, fp32", Broken(rank=_coarse_scores), "margin at|lead"),
    "margins": ("topk, fp32", Broken(rank=_other_margins), "margin at"),
    "the sink": ("topk, fp32", Broken(gather_kept=_forgotten_sink), "drops a forced block"),
    "sentinels": ("router, fp32", Broken(gather_kept=_no_sentinels), "other than the sentinel"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, message = WRONG[what]
    with pytest.raises(WrongAnswerError, match=message):
        check(the(name), Cpu(), install(monkeypatch, broken))


def test_a_bound_of_zero_allows_nothing() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert worst(zero, zero, zero, "x").share == 0
    with pytest.raises(WrongAnswerError, match=r"x at \[1\] is off by 1e-300, its bound is 0"):
        worst(torch.tensor([0, 1e-300, 0], dtype=torch.float64), zero, zero, "x")


def test_infinities_must_be_where_they_belong() -> None:
    inf = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    assert worst(inf.float(), inf, torch.ones(2), "x").share == 0
    for wrong in (torch.inf, torch.nan, 0.0):
        with pytest.raises(WrongAnswerError, match=r"x at \[1\] is"):
            worst(torch.tensor([1.0, wrong]), inf, torch.ones(2), "x")


# --- The list of cases --------------------------------------------------------------------------------------------


def test_the_list_covers_what_it_must() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {(c.preset, c.dtype) for c in CASES} >= {(p, t) for p in POLICIES for t in ("fp32", "bf16", "fp16")}
    assert {(c.dim, c.dtype) for c in CASES} >= {(d, t) for d in (64, 96, 128, 192, 256) for t in ("fp32", "bf16")}
    assert {c.heads // c.kv_heads for c in CASES} >= {1, 2, 3, 7, 8}
    assert {c.pad for c in CASES} == {None, "left", "right"}
    assert {c.layout for c in CASES} == {"plain", "projected", "spaced", "inner", "far"}
    for covered in (
        lambda c: c.packed,
        lambda c: c.value_dim not in (None, c.dim),
        lambda c: c.softcap,
        lambda c: c.rows == 1,
        lambda c: c.rows is not None and c.rows > 64 and c.keys % 64,
        lambda c: c.rows is None and c.keys % 64,
        lambda c: c.integers and c.packed,
    ):
        assert any(map(covered, CASES))


@pytest.mark.parametrize("name", ["topk, fp32", "router, bf16", "decode, quest", "longer: 4,000 keys", "packed"])
def test_cases_leave_something_to_cut(name: str) -> None:
    case = the(name)
    q, k, _ = case.tensors(torch.device("cpu"))
    selection = closecall.select(q, k, case.policy(), **case.arguments())
    assert selection.kept_fraction < 1
    assert not selection.margin.isnan().all()


@pytest.mark.parametrize("layout", ["projected", "spaced", "inner", "far"])
def test_layouts_hold_the_same_numbers_in_other_strides(layout: str) -> None:
    x = torch.randn(1, 2, 5, 8).half()
    got = laid_out(x, layout)
    assert torch.equal(got, x)
    assert got.stride() != x.stride()
    if layout == "far":
        assert got.stride(1) > 2**31


def test_names_and_patterns() -> None:
    assert matching([], CASES) == CASES
    assert {c.name for c in matching(["decode, quest", "softcap 5,*"], CASES)} == {
        "decode, quest", "softcap 5, fp32", "softcap 5, bf16", "softcap 5, fp16",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"did you mean 'decode, quest'.*--list"):
        matching(["decode, qest"], CASES)
