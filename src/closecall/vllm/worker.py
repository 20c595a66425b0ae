"""Our part of a worker: it hands our metadata builders the prompt lengths and says at start what is active."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from ..policy import as_policy
from .layers import SparseLayer, StepBuilder, layer_number
from .settings import RefusedError, Settings, layer_spans
from .stats import Stats, serve_metrics

logger = init_logger("vllm.closecall")


class Told:
    """Our part of a worker: a mixin for vLLM's workers."""

    vllm_config: Any  # vLLM's
    model_runner: Any
    rank: int
    closecall: Stats  # what it did

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        settings = Settings.read(self.vllm_config.additional_config)
        if settings is None:
            raise RefusedError("the worker was started without settings")
        self.closecall = Stats()
        self._hand_over_prompts(settings)
        self._say_what_is_active(settings)
        if settings.metrics_port:
            serve_metrics(self.closecall, settings.metrics_port + self.rank)

    def closecall_stats(self) -> dict[str, float]:
        """The totals of this worker, for `LLM.collective_rpc`."""
        return dict(vars(self.closecall.read()))

    def closecall_use(self, text: str | None) -> None:
        """Another policy, or None for vLLM's own attention: to compare in one engine, between requests.

        Call `LLM.reset_prefix_cache()` after it: cached pages hold what the policy before computed, and no summaries.
        """
        policy = None
        if text is not None:
            settings = Settings.read(self.vllm_config.additional_config)
            assert settings is not None  # checked at the start
            policy = settings.replaced(as_policy(text), self.vllm_config.cache_config.block_size).policy
        layers = self.vllm_config.compilation_config.static_forward_context.items()
        able = [(n, impl) for n, x in layers if isinstance(impl := getattr(x, "impl", None), SparseLayer) and impl.able]
        # All of them before any is used: a policy of another model changes nothing.
        made = [(impl, None if policy is None else policy.for_layer(layer_number(n))) for n, impl in able]
        for builder in self._builders():
            builder.block = 1 if policy is None else policy.block
        for impl, one in made:
            impl.use(one)

    def _hand_over_prompts(self, settings: Settings) -> None:
        runner = self.model_runner
        if not hasattr(getattr(runner, "input_batch", None), "num_prompt_tokens_cpu_tensor"):
            raise RefusedError("this model runner does not tell prompt lengths: set VLLM_USE_V2_MODEL_RUNNER=0")
        for builder in self._builders():
            builder.min_context, builder.block = settings.min_context, settings.policy.block
            builder.prompt_lens = lambda n: runner.input_batch.num_prompt_tokens_cpu_tensor[:n]

    def _builders(self) -> list[StepBuilder]:
        groups = [group for groups in self.model_runner.attn_groups for group in groups]
        return [b for group in groups for b in group.metadata_builders if isinstance(b, StepBuilder)]

    def _say_what_is_active(self, settings: Settings) -> None:
        layers = self.vllm_config.compilation_config.static_forward_context
        active: list[int] = []
        dense: dict[str, list[int]] = {}
        for name, layer in layers.items():
            impl = getattr(layer, "impl", None)
            if not isinstance(impl, SparseLayer):
                continue
            impl.stats = self.closecall
            why = impl.prepare(name, layer, settings)
            (active if why is None else dense.setdefault(why, [])).append(layer_number(name))
        left_out = "; ".join(f"layers {layer_spans(which)} stay vLLM's: {why}" for why, which in dense.items())
        if not active:
            raise RefusedError(
                f"no attention layer of this model can be sparse: {left_out or 'it has none of the kind'}"
            )
        if self.rank == 0:
            rows = f", prompts of {settings.min_context} tokens or more" if settings.min_context else ""
            note = f"; {left_out}" if left_out else ""
            logger.info("closecall is active in layers %s%s: %s%s", layer_spans(active), rows, settings.policy, note)


class Worker(Told, CPUWorker):
    """vLLM's CPU worker with our part mixed in."""
