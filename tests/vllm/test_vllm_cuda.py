"""The CUDA backend without a GPU: vLLM's own metadata and implementation classes on CPU tensors, and our Triton kernels
under the interpreter. No engine is started."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

with warnings.catch_warnings():  # vLLM's imports are not ours to judge
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1")  # "vllm" alone would be found: this very directory
    pytest.importorskip("triton")

    from vllm import platforms
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, MultipleOf
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

    from closecall import paged
    from closecall import vllm as plugin
    from closecall.vllm import cuda, engine, scheduler, worker, worker_cuda
    from closecall.vllm.settings import RefusedError, Settings
    from closecall.vllm.stats import Stats

HEADS, KV_HEADS, DIM, PAGE, PAGES = 2, 1, 16, 32, 9
ASKED = {"policy": "quest", "budget": 3, "tile_factor": 1, "block": 16, "tile": 16}
SETTINGS = Settings.read({"closecall": ASKED})


@pytest.fixture(autouse=True)
def alone_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("closecall.vllm.layers.get_tensor_model_parallel_world_size", lambda: 1)


class Cache:
    """Two requests on pages of vLLM's layout: tokens side by side (NHD), keys and values of a token in one."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(0)
        self.kv = torch.randn(PAGES, PAGE, KV_HEADS, 2 * DIM, generator=gen).transpose(1, 2)
        self.table = torch.tensor([[7, 2, 5, 0], [1, 8, 0, 0]], dtype=torch.int32)
        self.q = [torch.randn(128, HEADS, DIM, generator=gen) for _ in range(2)]

    def common(self, lengths: list[tuple[int, int]], requests: list[int]) -> CommonAttentionMetadata:
        """Of requests whose next rows are (from, to)."""
        rows = torch.tensor([0, *[b - a for a, b in lengths]]).cumsum(0).to(torch.int32)
        keys = torch.tensor([b for _, b in lengths], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=rows, query_start_loc_cpu=rows, seq_lens=keys, seq_lens_cpu_upper_bound=keys,
            num_reqs=len(lengths), num_actual_tokens=int(rows[-1]), max_query_len=int(rows.diff().max()),
            max_seq_len=int(keys.max()), block_table_tensor=self.table[requests], slot_mapping=torch.zeros(0),
        )  # fmt: skip

    def rows(self, lengths: list[tuple[int, int]], requests: list[int]) -> torch.Tensor:
        return torch.cat([self.q[i][a:b] for i, (a, b) in zip(requests, lengths, strict=True)])


def config() -> SimpleNamespace:
    """As much of a VllmConfig as vLLM's Triton builder reads."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: HEADS, get_num_kv_heads=lambda parallel: KV_HEADS,
        get_head_size=lambda: DIM, rswa_window=None,
    )  # fmt: skip
    compilation = SimpleNamespace(cudagraph_mode=None, static_forward_context={})
    return SimpleNamespace(model_config=model, parallel_config=None, compilation_config=compilation)


def builder(prompts: dict[int, list[int]]) -> cuda.TritonBuilder:
    """`prompts` are the prompt lengths of a step, by its number of requests."""
    spec = SimpleNamespace(block_size=PAGE)
    made = cuda.TritonBuilder(spec, [], config(), torch.device("cpu"))
    made.block = 16
    made.prompt_lens = lambda n: torch.tensor(prompts[n])
    return made


def impl(**given: object) -> cuda.TritonImpl:
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "num_kv_heads": KV_HEADS}
    return cuda.TritonImpl(HEADS, DIM, DIM**-0.5, **(usual | given))


def layer(cache: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(kv_cache=cache)


def test_chunks_and_mixed_steps_give_what_the_specification_gives(monkeypatch):
    cache, prompts = Cache(), {1: [70], 2: [70, 39]}
    made, attention = builder(prompts), impl()
    assert attention.prepare("model.layers.3.attn", layer(cache.kv), SETTINGS) is None
    plain = []
    monkeypatch.setattr(TritonAttentionImpl, "forward", lambda self, *a, **k: plain.append(a[5]) or a[6].fill_(7.0))

    def run(lengths, requests):
        metadata = made.build(0, cache.common(lengths, requests))
        assert isinstance(metadata, TritonAttentionMetadata)
        rows = cache.rows(lengths, requests)
        padded = torch.cat([rows, rows.new_full((5, HEADS, DIM), torch.nan)])  # as graphs pad
        out = torch.zeros(len(padded), HEADS * DIM)
        attention.forward(layer(cache.kv), padded, None, None, cache.kv, metadata, out)
        return out[: len(rows)].view(-1, HEADS, DIM), metadata.step

    ours, _ = run([(0, 48)], [0])
    assert not plain
    mixed, step = run([(48, 70), (39, 40)], [0, 1])
    assert not plain
    assert not step.decodes
    # The same by the specification, whole prompt at a time.
    keys, values = cuda.key_pages(cache.kv)
    policy = SETTINGS.policy.for_layer(3)
    pages = paged.Pages(cache.table[:1], torch.tensor([0, 70]), torch.tensor([70]), torch.tensor([70]))
    want, kept = paged.attention(
        cache.q[0][:70], keys, values, policy, pages, backend="reference", return_selection=True
    )
    assert kept.kept_fraction < 0.9
    torch.testing.assert_close(torch.cat([ours, mixed[:22]]), want, atol=2e-6, rtol=1e-5)
    dense = paged.Pages(cache.table[1:], torch.tensor([0, 1]), torch.tensor([40]))
    want = paged.attention(cache.q[1][39:40], keys, values, "dense:block=16,tile=16", dense, backend="reference")
    torch.testing.assert_close(mixed[22:], want, atol=2e-6, rtol=1e-5)

    # Steps of nothing but decoding are vLLM's, and complete our summaries.
    before = attention.summaries._store.clone()
    decoded, step = run([(70, 71), (47, 48)], [0, 1])
    assert step.decodes
    assert len(plain) == 1
    assert bool((decoded == 7.0).all())
    changed = (attention.summaries._store != before).any(-1).any(0).any(0).nonzero().flatten().tolist()
    assert changed == [8 * 2]  # the third block of the second request: on its second page, which is page 8


def test_what_is_counted_stays_on_the_device_until_it_is_read():
    cache = Cache()
    keys, _ = cuda.key_pages(cache.kv)
    pages = paged.Pages(cache.table[:1], torch.tensor([0, 70]), torch.tensor([70]), torch.tensor([70]))
    made = paged.select(cache.q[0][:70], keys, SETTINGS.policy, pages, backend="reference")
    stats = Stats()
    for _ in range(2):
        stats.add(made, 72, 0.0)
    assert stats.totals.kept == 0
    totals = stats.read()
    assert (totals.kept, totals.cut) == (2 * int(made.counts.sum()), 2 * int((~made.margin.isnan()).sum()))
    assert (totals.prompt_rows, totals.dense_rows) == (140, 4)
    assert stats.read().kept == totals.kept
    assert "s in attention" not in totals.line()


class TestLayersThatStay:
    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"sliding_window": 256}, "a sliding window of 256"),
            ({"alibi_slopes": [0.5, 0.25]}, "alibi"),
            ({"sinks": torch.zeros(HEADS)}, "attention sinks"),
            ({"kv_cache_dtype": "fp8"}, "a fp8 cache"),
            ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
            ({"kv_sharing_target_layer_name": "model.layers.1.attn"}, "keys shared with another layer"),
            ({"chunk_lookback": 2}, "chunked local attention"),
        ],
    )
    def test_say_why(self, given, why):
        attention = impl(**given)
        assert attention.prepare("model.layers.3.attn", layer(Cache().kv), SETTINGS) == why
        assert attention.policy is None

    def test_for_the_cache(self):
        small = torch.zeros(PAGES, KV_HEADS, 24, 2 * DIM)
        assert "pages of 24 tokens hold no whole blocks of 16" in impl().prepare("l.0.a", layer(small), SETTINGS)
        wide = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * 512)
        assert "head dim 512" in impl().prepare("l.0.a", layer(wide), SETTINGS)

    def test_for_the_policy(self, monkeypatch):
        monkeypatch.setattr(cuda, "has_kernel", lambda policy, dim: False)
        said = impl().prepare("l.0.a", layer(Cache().kv), SETTINGS)
        assert said == "no Triton kernel that ranks blocks as 'quest' does"

    def test_not_for_candidates(self):
        asked = Settings.read({"closecall": ASKED | {"pool": 8, "candidates": 2}})
        attention = impl()
        assert attention.prepare("l.0.a", layer(Cache().kv), asked) is None
        assert attention.policy.candidates == 2

    def test_made_up_batches_have_no_step(self):
        """vLLM warms up with rows that have no keys."""
        common = Cache().common([(0, 8)], [0])
        common.seq_lens_cpu_upper_bound = torch.tensor([1], dtype=torch.int32)
        assert not hasattr(builder({1: [8]}).build(0, common), "step")


class TestBackends:
    @pytest.mark.parametrize("backend", [cuda.FlashBackend, cuda.TritonBackend])
    def test_what_they_declare(self, backend):
        assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
        assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
        assert not backend.get_builder_cls().supports_update_block_table
        assert not backend.forward_includes_kv_cache_update
        assert backend.get_supported_kernel_block_sizes() == [MultipleOf(64)]
        assert [backend.supports_block_size(n) for n in (None, 16, 64, 128)] == [True, False, True, True]
        assert backend.get_preferred_block_size(16) == 64

    @pytest.mark.parametrize(("there", "kind"), [(True, "Flash"), (False, "Triton")])
    def test_registered_as_custom(self, monkeypatch, there, kind):
        monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True))
        monkeypatch.setattr("vllm.v1.attention.backends.fa_utils.is_flash_attn_varlen_func_available", lambda: there)
        plugin.register()
        try:
            assert AttentionBackendEnum.CUSTOM.get_class() is getattr(cuda, f"{kind}Backend")
        finally:
            AttentionBackendEnum.CUSTOM.clear_override()

    def test_the_platform_is_ours_on_cuda(self, monkeypatch):
        monkeypatch.setattr(platforms, "cpu_platform_plugin", lambda: None)
        monkeypatch.setattr(platforms, "cuda_platform_plugin", lambda: plugin.CUDA_PLATFORM)
        assert plugin.platform() == "closecall.vllm.platform_cuda.Platform"
        monkeypatch.setattr(platforms, "cuda_platform_plugin", lambda: None)
        assert plugin.platform() is None

    def test_the_platform_asks_vllms_first(self, monkeypatch):
        """vLLM's own CUDA platform cannot be imported here, so another stands in for it."""
        asked = []
        theirs = type("CudaPlatform", (), {"check_and_update_config": classmethod(lambda cls, c: asked.append(c))})
        monkeypatch.setitem(sys.modules, "vllm.platforms.cuda", SimpleNamespace(CudaPlatform=theirs))
        made = config_of()
        importlib.import_module("closecall.vllm.platform_cuda").Platform.check_and_update_config(made)
        assert asked == [made]
        assert made.parallel_config.worker_cls == engine.OUR_GPU_WORKER


def config_of(**changes: object) -> SimpleNamespace:
    """As much of a VllmConfig as our platform reads."""
    scheduling = {
        "max_num_batched_tokens": 2048, "long_prefill_token_threshold": 0, "max_num_seqs": 256, "scheduler_cls": None,
        "async_scheduling": True,
    }  # fmt: skip
    parallel = {"worker_cls": engine.GPU_WORKER, "decode_context_parallel_size": 1, "pipeline_parallel_size": 1}
    made = SimpleNamespace(
        scheduler_config=SimpleNamespace(**scheduling), parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(block_size=16, user_specified_block_size=False), use_v2_model_runner=False,
        attention_config=SimpleNamespace(backend=AttentionBackendEnum.CUSTOM),
        additional_config={"closecall": "auto"}, model_config=SimpleNamespace(),
    )  # fmt: skip
    for path, value in changes.items():
        *inner, name = path.split("__")
        setattr(getattr(made, inner[0]) if inner else made, name, value)
    return made


class TestPlatform:
    @pytest.mark.parametrize("at_once", [True, False])
    def test_brings_our_classes_and_pages_in(self, at_once):
        made = config_of(scheduler_config__async_scheduling=at_once)
        engine.on_cuda(made)
        path = made.scheduler_config.scheduler_cls
        found = getattr(scheduler, path.rsplit(".", 1)[1])
        assert issubclass(found, scheduler.AsyncScheduler) is at_once
        assert issubclass(found, scheduler.TileScheduler)
        assert made.parallel_config.worker_cls.endswith("worker_cuda.Worker")
        assert issubclass(worker_cuda.Worker, worker.Told)
        assert made.cache_config.block_size == 64

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"attention_config__backend": AttentionBackendEnum.FLASH_ATTN}, "pass --attention-backend CUSTOM"),
            ({"attention_config__backend": None}, "pass --attention-backend CUSTOM"),
            ({"use_v2_model_runner": True}, "set VLLM_USE_V2_MODEL_RUNNER=0"),
            ({"cache_config__user_specified_block_size": True}, "pages of 16 tokens do not hold whole tiles of 64"),
            ({"scheduler_config__scheduler_cls": "my.Scheduler"}, "needs its own scheduler"),
            ({"parallel_config__worker_cls": "my.Worker"}, "needs its own worker"),
            ({"parallel_config__pipeline_parallel_size": 2}, "use tensor parallelism"),
            ({"speculative_config": object()}, "speculative_config is set"),
        ],
    )
    def test_refusals(self, changes, why):
        with pytest.raises(RefusedError, match=why):
            engine.on_cuda(config_of(**changes))


def test_custom_without_a_policy_is_refused(monkeypatch):
    empty = config_of(additional_config={})
    monkeypatch.setattr("closecall.vllm.layers.get_current_vllm_config", lambda: empty)
    with pytest.raises(RefusedError, match="attention backend CUSTOM needs a policy"):
        cuda.FlashBackend.get_impl_cls()
