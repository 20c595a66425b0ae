"""The verdict on made-up results: what it claims, and what it does not."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import closecall
from closecall_lab.bench.validate import spot
from closecall_lab.bench.validate.check import WrongAnswerError
from closecall_lab.bench.validate.device import Cpu
from closecall_lab.bench.validate.verdict import interval, sentences, speedup

FILE = Path("out/validate.json")
GOOD: list[Any] = [({"case": "whole"}, {"problem": None}), ({"case": "padded"}, {"problem": None})]


def timed(kind: str = "gaussian", **by_context: tuple[float, float, float]) -> list[Any]:
    return [
        (
            {"context": int(n[1:]), "inputs": kind},
            {
                "problem": None,
                "rows": [
                    {"name": "sdpa", "speedup": None},
                    {"name": "router", "speedup": {"over": "sdpa", "times": t, "low": low, "high": high}},
                ],
            },
        )
        for n, (t, low, high) in by_context.items()
    ]


def test_faster_from_where_the_interval_leaves_no_doubt() -> None:
    said = sentences(GOOD, timed(n8192=(0.9, 0.8, 1.0), n32768=(1.1, 0.98, 1.3), n65536=(2.0, 1.9, 2.1),
                                 n131072=(3.5, 3.31, 3.62)), True, FILE)  # fmt: skip
    assert said[0] == "RIGHT: 6 of 6 checks and timings passed."
    assert said[1] == "router is faster than the best dense from 64K tokens on: 3.50x at 128K (3.31 to 3.62)."
    assert str(FILE) in said[-1]


def test_a_context_that_falls_back_takes_the_claim_with_it() -> None:
    said = sentences(GOOD, timed(n8192=(2.0, 1.9, 2.1), n65536=(1.2, 0.9, 1.4)), True, FILE)
    assert said[1].startswith("router is not faster than the best dense at any context timed for certain: 1.20x at 64K")


def test_graphs_and_clustered_keys_are_told_beside() -> None:
    plain = timed(n8192=(2.0, 1.9, 2.1), n65536=(3.0, 2.9, 3.1))
    plain[1][1]["rows"][1]["graph_speedup"] = {"over": "fa3", "times": 2.5, "low": 2.4, "high": 2.6}
    clustered = timed("clustered", n8192=(1.1, 0.9, 1.2), n65536=(4.0, 3.9, 4.1))
    assert sentences(GOOD, [*plain, *clustered], True, FILE)[1] == (
        "router is faster than the best dense from 64K tokens on: 3.00x at 64K (2.90 to 3.10); both from a CUDA graph "
        "2.50x at 64K (2.40 to 2.60); on clustered keys 4.00x at 64K (3.90 to 4.10)."
    )  # from 8K on normal keys alone: what holds for one kind is not claimed


def test_what_ran_out_of_memory_is_named_and_the_rest_is_judged() -> None:
    starved = [({"context": 131072, "inputs": "gaussian"}, {"problem": None, "no_memory": "OutOfMemoryError: 24 GiB"})]
    said = sentences(GOOD, [*timed(n8192=(2.0, 1.9, 2.1)), *starved], True, FILE)
    assert said[0] == "RIGHT: 3 of 4 checks and timings passed."
    assert said[1].startswith("OUT OF MEMORY: 1 of 4 could not be finished. timing at 128K, gaussian keys: OutOfMemory")
    assert str(FILE) in said[1]
    assert said[2] == "router is faster than the best dense from 8K tokens on: 2.00x at 8K (1.90 to 2.10)."


def test_nothing_is_said_of_speed_where_something_is_wrong() -> None:
    bad = [*GOOD, ({"case": "graph"}, {"problem": "the replay differs"})]
    said = sentences(bad, timed(n8192=(2.0, 1.9, 2.1)), True, FILE)
    assert said[0] == "WRONG: 1 of 4 failed. graph: the replay differs."
    assert str(FILE) in said[1]
    assert not any("faster" in line for line in said)
    failed = [({"context": 65536, "inputs": "gaussian"}, {"problem": "out of memory"})]
    assert sentences([*bad], failed, True, FILE)[0].endswith("graph: the replay differs, and 1 more.")


def test_a_run_that_was_cut_short_and_one_that_left_out() -> None:
    assert sentences(GOOD, [], False, FILE)[0].startswith("NOT FINISHED: 2 were tried and right")
    skipped = [*GOOD, ({"case": "long"}, {"problem": None, "skipped": "needs 90 GiB"})]
    assert sentences(skipped, [], True, FILE)[0] == (
        "RIGHT: 2 of 3 checks and timings passed, 1 left out for want of memory."
    )


def test_the_best_dense_is_the_rival() -> None:
    found = speedup({"sdpa": [4.0, 4.0, 4.0], "dense": [2.0, 2.2, 2.0]}, [1.0, 1.0, 2.0])
    assert (found["over"], found["times"], found["low"], found["high"]) == ("dense", 2.0, 1.0, 2.2)


@pytest.mark.parametrize(
    ("n", "ends"), [(1, (0, 0)), (3, (0, 2)), (5, (0, 4)), (6, (0, 5)), (9, (1, 7)), (20, (5, 14))]
)
def test_the_interval_by_hand(n: int, ends: tuple[int, int]) -> None:
    """Of n values the r-th from each end: 1 - 2 P(binomial(n, 1/2) < r) >= 0.95, tables of order statistics."""
    assert interval([float(i) for i in range(n)]) == ends


def test_the_interval_covers() -> None:
    draw = random.Random(0)
    inside = 0
    for _ in range(400):
        low, high = interval([draw.expovariate(1.0) for _ in range(25)])
        inside += low <= 0.6931 <= high
    assert inside >= 0.94 * 400
    values = [draw.expovariate(1.0) for _ in range(25)]
    assert interval(values)[0] < statistics.median(values) < interval(values)[1]


# Cells of timed outputs.


@pytest.mark.parametrize("policy", ["dense", "router-on-quest"])
def test_a_timed_output_is_looked_at(policy: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    p = closecall.policy(policy, block=16, tile=32, **({} if policy == "dense" else {"budget": 3}))
    kept = None if policy == "dense" else closecall.select(q, k, p, backend="reference")
    out = closecall.attention(q, k, v, p, backend="reference")
    found = spot.check(q, k, v, kept, out, (16, 32), 0.25, Cpu(), "x")
    assert found["cells"] == 40  # all there are
    assert 0 < found["used"] < 1
    out[0, 3, 299, 5] += 0.01
    with pytest.raises(WrongAnswerError, match=r"x at head 3, tile 9 at .* is off by 0.01"):
        spot.check(q, k, v, kept, out, (16, 32), 0.25, Cpu(), "x")


def test_cells_are_drawn_once_and_the_last_is_always_there() -> None:
    drawn = spot.cells(28, 2048)
    assert len(set(drawn)) == len(drawn) == spot.CELLS
    assert drawn[-1] == (27, 2047)
    assert max(h for h, _ in drawn) < 28
    assert spot.cells(1, 1) == [(0, 0)]
