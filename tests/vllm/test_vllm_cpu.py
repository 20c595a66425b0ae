"""The CPU backend without an engine: whose kernel decodes, and caches that are not laid out as we read them."""

from __future__ import annotations

import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

import closecall

with warnings.catch_warnings():  # vLLM's imports are not ours to judge
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1")  # "vllm" alone would be found: this very directory

    from closecall.vllm import backend, worker
    from closecall.vllm.layers import Step
    from closecall.vllm.settings import RefusedError, Settings
    from closecall.vllm.stats import Stats, _Collector

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 64


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    model = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn.get_current_vllm_config", lambda: model)
    monkeypatch.setattr("closecall.vllm.layers.get_tensor_model_parallel_world_size", lambda: 1)


def impl() -> backend.Impl:
    return backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto")


def layer(made: backend.Impl, isa: str = "vec") -> SimpleNamespace:
    return SimpleNamespace(kv_cache=torch.zeros(3, KV_HEADS, PAGE, 2 * DIM), isa=isa, impl=made)


def start(**layers: SimpleNamespace) -> None:
    """What a worker does with an engine's layers."""
    context = {f"model.{name}.attn": one for name, one in layers.items()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    told = SimpleNamespace(vllm_config=config, rank=0, closecall=Stats())
    worker.Told._say_what_is_active(told, Settings.read({"closecall": "auto"}))


def test_vllms_own_layout_is_known():
    assert backend.layout_is_known("vec", KV_HEADS, PAGE, DIM, torch.float32)
    made = impl()
    start(**{"layers.0": layer(made)})
    assert made.able


def test_an_engine_of_another_instruction_set_is_refused(monkeypatch):
    monkeypatch.setattr(backend.ops, "cpu_attn_reshape_and_cache", lambda *args, **more: None)  # writes elsewhere
    with pytest.raises(RefusedError, match=r"no attention layer .* the cache layout of vLLM's 'amx' kernels"):
        start(**{"layers.0": layer(impl(), "amx")})


@pytest.mark.parametrize("completes", [False, True])
@pytest.mark.parametrize("decode", ["vllm", "closecall"])
def test_whose_kernel_decodes(monkeypatch, decode, completes):
    calls = []
    monkeypatch.setattr(backend.CPUAttentionBackendImpl, "forward", lambda self, *a, **k: calls.append("vllm"))
    monkeypatch.setattr("closecall.paged.attend", lambda *a, **k: calls.append("closecall"))
    monkeypatch.setattr("closecall.paged.PageSummaries.update", lambda *a: calls.append("summaries"))
    made = impl()
    made.prepare("model.layers.0.attn", layer(made), Settings.read({"closecall": {"policy": "auto", "decode": decode}}))
    step = Step(pages=None, decodes=True, completes=completes)
    metadata = SimpleNamespace(step=step, num_actual_tokens=1)
    q = torch.zeros(1, HEADS, DIM)
    made.forward(None, q, None, None, layer(made).kv_cache, metadata, torch.zeros(1, HEADS * DIM))
    assert calls == [decode, *(["summaries"] if completes else [])]


def test_scrapes_meanwhile_count_nothing_twice():
    made = closecall.select(torch.randn(1, 2, 256, 16), torch.randn(1, 1, 256, 16), "quest:budget=4,block=16,tile=16")
    stats, done, switching = Stats(), threading.Event(), sys.getswitchinterval()
    collector = _Collector(stats)

    def scrape() -> None:
        while not done.is_set():
            collector.collect()

    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for _ in range(300):
            stats.add(made, 256, 0.0)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(switching)
    assert stats.read().kept == 300 * int(made.counts.sum())


def engine_of(*made: backend.Impl) -> SimpleNamespace:
    """A worker as `closecall_use` sees it."""
    context = {f"model.layers.{i}.attn": layer(one) for i, one in enumerate(made)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        additional_config={"closecall": "auto"},
        cache_config=SimpleNamespace(block_size=PAGE),
    )
    builder = SimpleNamespace(block=64)
    return SimpleNamespace(vllm_config=config, _builders=lambda: [builder], builder=builder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quest:tile=128", "whole tiles of 128"),
        ("quest:block=128,tile=128", "whole tiles of 128"),
        ("router", "closecall calibrate"),
    ],
)
def test_a_policy_that_this_engine_cannot_run_changes_nothing(text, said):
    made = [impl(), impl()]
    for number, one in enumerate(made):
        one.prepare(f"model.layers.{number}.attn", layer(one), Settings.read({"closecall": "auto"}))
    told, before = engine_of(*made), [one.policy for one in made]
    with pytest.raises(ValueError, match=said):
        worker.Told.closecall_use(told, text)
    assert [one.policy for one in made] == before
    assert told.builder.block == 64
    worker.Told.closecall_use(told, "quest:block=32,tile=32")
    assert {one.policy.tile for one in made} == {32}
    worker.Told.closecall_use(told, None)
    assert [one.policy for one in made] == [None, None]


def test_the_views_of_a_cache_are_made_once_and_follow_it():
    made = impl()
    first, second = layer(made).kv_cache, layer(made).kv_cache
    keys, values = made._pages(first)
    assert made._pages(first)[0] is keys
    assert made._pages(second)[0].data_ptr() == second.data_ptr() != keys.data_ptr()
    assert made._pages(first)[1].data_ptr() == values.data_ptr()
