from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from closecall_lab.spine import timing
from closecall_lab.spine.timing import Contender, Samples, interleave


@dataclass(frozen=True)
class Scripted(Contender):
    """Says what it took, call by call, and takes no time."""

    script: Any = None
    log: list[str] = field(default_factory=list)

    def run(self) -> tuple[dict[str, float], Any]:
        self.log.append(self.name)
        mine = self.log.count(self.name) - 1
        return {"a": self.script(mine), "b": 0.0}, None


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def two(seconds_one: float, seconds_two: float) -> tuple[list[Scripted], list[str]]:
    log: list[str] = []
    each = {"one": seconds_one, "two": seconds_two}
    return [Scripted(name, {}, 1, lambda _, s=s: s, log) for name, s in each.items()], log


def test_as_many_rounds_as_fit() -> None:
    contenders, log = two(0.3, 0.2)
    samples = interleave(contenders, seconds=5.01, most_rounds=100)
    assert samples.rounds == 10
    assert len(log) == 2 * (1 + 10)  # the first round warms up and does not count


def test_never_more_rounds_than_asked_for() -> None:
    contenders, _ = two(0.3, 0.2)
    assert interleave(contenders, seconds=1000, most_rounds=4).rounds == 4


def test_three_rounds_even_where_time_is_short_and_then_the_first_counts() -> None:
    contenders, log = two(30, 20)
    samples = interleave(contenders, seconds=1, most_rounds=15)
    assert samples.rounds == 3
    assert len(log) == 2 * 3


def test_fast_contenders_are_called_often_enough_for_the_clock() -> None:
    log: list[str] = []
    # 2 ms each: five calls fill a sample of 10 ms. The first round calls twice, the second to see it warm.
    fast = Scripted("fast", {}, 1, lambda call: 0.002 if call < 2 else 0.001 * (call - 1), log)
    samples = interleave([fast], seconds=0.031, most_rounds=15)
    assert samples.rounds == 3
    assert len(log) == 2 + 3 * 5
    assert samples.laps["fast"][0]["a"] == pytest.approx(0.003)  # the mean of 1 to 5 ms


def test_contenders_take_turns_in_changing_order() -> None:
    contenders, log = two(0.5, 0.5)
    samples = interleave(contenders, seconds=20.5, most_rounds=20)
    rounds = [tuple(log[i : i + 2]) for i in range(2, len(log), 2)]
    assert samples.rounds == len(rounds) == 20
    assert set(rounds) == {("one", "two"), ("two", "one")}


def test_everyone_runs_on_their_own_thread_count() -> None:
    seen: dict[str, set[int]] = {"one": set(), "two": set()}

    def note(name: str) -> float:
        seen[name].add(torch.get_num_threads())
        return 1.0

    contenders = [Scripted(n, {}, t, lambda _, n=n: note(n)) for n, t in (("one", 1), ("two", 2))]
    interleave(contenders, seconds=1, most_rounds=3)
    assert seen == {"one": {1}, "two": {2}}


def test_the_probe_runs_once_a_round() -> None:
    contenders, _ = two(1, 1)
    readings = iter(range(100))
    samples = interleave(contenders, seconds=8.1, most_rounds=15, probe=lambda: float(next(readings)))
    assert samples.probes == [1.0, 2.0, 3.0, 4.0]  # the reading of the warm-up round goes with it


def test_steps_get_what_the_step_before_returned() -> None:
    steps = {"make": lambda nothing: [nothing], "use": lambda made: [*made, "used"]}
    taken, result = Contender("c", steps, 1).run()
    assert result == [None, "used"]
    assert list(taken) == ["make", "use"]
    assert min(taken.values()) >= 0


SAMPLES = Samples(
    {
        "ours": [{"select": 1.0, "attend": 1.0}, {"select": 2.0, "attend": 2.0}, {"select": 1.0, "attend": 9.0}],
        "theirs": [{"": 8.0}, {"": 8.0}, {"": 10.0}],
    }
)


def test_medians_and_shares() -> None:
    assert SAMPLES.median("ours") == 4
    assert SAMPLES.median("ours", "attend") == 2
    assert SAMPLES.share("ours", "select") == 0.5
    assert SAMPLES.median("theirs", "select") == 0  # a contender without that step


def test_ratios_pair_the_runs_of_a_round() -> None:
    assert SAMPLES.ratio("theirs", "ours") == 2  # of 4, 2 and 1; the medians' own ratio happens to be the same
    assert SAMPLES.ratio("ours", "theirs") == 0.5
    assert SAMPLES.ratio("theirs", "ours", "attend") == 4  # of 8, 4 and 10/9
    shifted = Samples({"a": [{"": x} for x in (1.0, 10.0, 100.0)], "b": [{"": x} for x in (10.0, 100.0, 1.0)]})
    assert shifted.ratio("a", "b") == 0.1  # where the ratio of medians would be 1


def test_who_did_not_run_has_no_ratio() -> None:
    assert SAMPLES.ratio("flex", "ours") is None
    assert SAMPLES.ratio("ours", "flex") is None
