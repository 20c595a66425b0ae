"""One prefill, split: the parts add up, nothing is left behind, and watching changes no number of the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from closecall import attach, backends, policy
from closecall_lab.bench.profile.parts import (
    ATTENTION,
    PARTS,
    StreamClock,
    Watch,
    allowed,
    elsewhere,
    function,
    selection,
    split,
)

LAYERS = 3
SPARSE = policy("router-on-quest", budget=3)


class Ticks:
    """A clock that moves by one at every look."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, begin: int, end: int) -> float:
        return float(end - begin)


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers of full attention, and one of a window, which is left alone and belongs to the rest."""
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.Olmo3Config(
            hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=8, layer_types=["sliding_attention", *["full_attention"] * 2],
            sliding_window=4, pad_token_id=0, eos_token_id=1, attn_implementation="sdpa",
        )  # fmt: skip
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt(n: int = 640) -> torch.Tensor:
    return torch.arange(n)[None] % 8


def test_the_model_as_it_is(model: Any) -> None:
    clock = Ticks()
    lap = split(model, lambda: model(prompt()), clock)
    assert list(lap) == list(PARTS)
    assert lap["attend"] == 2  # one tick in each full layer
    assert selection(lap) == lap["around"] == 0
    assert sum(lap.values()) == clock.now - 1  # from the first look to the last


def test_an_attached_model(model: Any) -> None:
    clock = Ticks()
    with attach(model, SPARSE):
        lap = split(model, lambda: model(prompt()), clock)
    layers, apart = 2, 1  # the look at summaries lasts a tick in each layer and is no part of the wall
    assert lap["summaries"] == layers
    assert lap["ranking"] == 0  # of one tick all was summaries
    assert lap["rule"] == lap["indices"] == lap["attend"] == layers
    assert sum(lap.values()) == clock.now - 1 - layers * apart
    assert function(lap) == sum(lap[name] for name in ATTENTION)
    assert function(lap) + elsewhere(lap) == sum(lap.values())
    assert allowed(lap) == 4 * layers


def test_a_budget_that_covers_everything_selects_nothing(model: Any) -> None:
    with attach(model, SPARSE):
        lap = split(model, lambda: model(prompt(128)), Ticks())
    assert selection(lap) == 0
    assert lap["attend"] == 2


def test_ranking_is_what_summaries_are_not() -> None:
    watch = Watch(Ticks())
    watch.attached = True
    for name, begin, end in (("wall", 0, 100), ("function", 10, 80), ("rank", 12, 42), ("extra", 42, 47)):
        watch.add(name, begin, end)
    for name, begin, end in (("rule", 47, 50), ("indices", 50, 52), ("attend", 52, 78)):
        watch.add(name, begin, end)
    assert watch.parts() == {
        "summaries": 5, "ranking": 25, "rule": 3, "indices": 2, "attend": 26, "around": 70 - 5 - 61, "rest": 30,
        "linear layers": 0,
    }  # fmt: skip


def test_watching_changes_nothing(model: Any) -> None:
    registry = pytest.importorskip("transformers").modeling_utils.ALL_ATTENTION_FUNCTIONS
    seen: list[torch.Tensor] = []
    with attach(model, SPARSE):
        before, local, choose = dict(registry), dict(registry._local_mapping), backends.choose
        with torch.no_grad():
            plain = model(prompt()).logits
        split(model, lambda: seen.append(model(prompt()).logits), Ticks())
        torch.testing.assert_close(seen[0], plain, rtol=0, atol=0)
        with pytest.raises(IndexError):
            split(model, lambda: model(prompt() + 1), Ticks())  # one token past the vocabulary
        assert dict(registry) == before
        assert registry._local_mapping == local
        assert backends.choose is choose


def test_a_stream_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.made += 1
            self.at = 5.0 * Event.made

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert log == ["wait"]  # torch refuses to read events that may not have happened yet
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StreamClock()
    begin, end = clock.mark(), clock.mark()
    assert clock.seconds(begin, end) == 0.005


@pytest.mark.usefixtures("no_memory")
def test_turns_are_laps_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from closecall_lab.bench.profile import prefills
    from closecall_lab.bench.validate.device import Cpu

    monkeypatch.setattr(prefills, "SETTLE_SECONDS", 0)
    calls: list[str] = []

    def timed(name: str, seconds: float) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            calls.append(name)
            return {"attend": seconds, "rest": 1.0}

        return run

    slow = [prefills.Prefill.named("a", timed("a", 3.0)), prefills.Prefill.named("b", timed("b", 1.0))]
    samples = prefills.take_turns(slow, 2, Cpu())
    assert sorted(calls) == ["a"] * 2 + ["b"] * 2  # the first round took long, so it counts
    assert samples.seconds("a") == [4.0, 4.0]
    calls.clear()

    class Gpu(Cpu):
        is_gpu = True

    assert prefills.take_turns(slow, 1, Gpu()).seconds("b") == [2.0]
    assert sorted(calls) == ["a"] * 2 + ["b"] * 2  # the first call compiles, and never counts
    calls.clear()
    quick = [prefills.Prefill.named("c", timed("c", 0.0))]
    assert prefills.take_turns(quick, 1, Cpu()).rounds == 1
    assert calls == ["c", "c"]  # the first one warmed up
