"""What transformers calls in the place of its own attention function, and what an attached layer then does."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..backends import reference
from ..certify.certificate import certify
from ..policy import Policy
from ..ranking import AllHeads
from ..selection import Selection, each_head
from .layers import Layer
from .masks import from_cu_seqlens, is_segments, mask_function
from .op import Call, Ran, attention_op, run
from .reuse import Reuse
from .stats import LayerStats, Recorder

PREFIX = "closecall_"
STATE = "_closecall"  # the attribute of an attached module that holds its AttachedLayer
NEVER = 2**62


@dataclass
class Settings:
    """What all layers of an attached model have in common, and who watches them."""

    policy: Policy
    min_context: int
    decode: Literal["dense", "sparse"]
    group: str  # the name of the process group over which heads are spread; empty for one process
    all_heads: AllHeads
    backend: str = "auto"
    prompt_len: int | None = None
    recorder: Recorder | None = None
    see: Callable[[int, Selection], None] | None = None
    tap: Callable[[int, Call], None] | None = None
    eps: float | None = None
    certified_tiles: int | None = None
    generating: dict[int, int] = field(default_factory=dict)  # lengths of prompts that `generate` cuts, by thread

    def prompt_len_here(self) -> int | None:
        """The length of the prompt that this thread's calls are of; None where nobody said it."""
        return self.generating.get(threading.get_ident(), self.prompt_len)


class AttachedLayer:
    """What one attached layer does. Kept on its module, outside of torch's bookkeeping."""

    def __init__(self, settings: Settings, layer: Layer, chosen: bool) -> None:
        self.settings = settings
        self.layer = layer
        self.chosen = chosen  # a full-attention layer not among layers= gets our masks, so it runs dense on our kernel
        self.policy = settings.policy.for_layer(layer.index)
        self.policy_json = self.policy.to_json()
        self.stats = LayerStats()
        self.reuse = Reuse() if chosen and self.policy.rule.needs_scores else None
        self._hook: Any = None
        if self.reuse is not None:
            self._hook = layer.module.register_forward_pre_hook(self.reuse.look, with_kwargs=True)

    def drop(self) -> None:
        """Takes it off its module."""
        self.layer.module.__dict__.pop(STATE, None)
        if self._hook is not None:
            self._hook.remove()
        if self.reuse is not None:
            self.reuse.drop()

    def dense_below(self, rows: int) -> int:
        """The number of keys from which a call goes sparse: never for decode, unless asked."""
        decode = rows < self.policy.tile and self.settings.decode == "dense"
        return self.settings.min_context if self.chosen and not decode else NEVER

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """One call: attention by the layer's policy, counted and shown to whoever watches."""
        below, settings = self.dense_below(q.shape[2]), self.settings
        prompt_len = settings.prompt_len_here()
        try:
            known = None if self.reuse is None else self.reuse.take(self.layer.index, q.shape[2], k)
            given = (self.policy, below, scale, softcap, settings.backend, settings.all_heads, known, prompt_len)
            ran = run(q, k, v, segments, *given)
        finally:
            if self.reuse is not None:
                self.reuse.done()
        candidate_keys = 0 if below == NEVER else k.shape[2]
        self.stats.add_call(candidate_keys, ran.select_seconds, ran.attend_seconds)
        if ran.kept is not None:
            self.stats.add(ran.kept)
            self._show(ran, ran.kept, scale, softcap)
        if settings.tap is not None:
            settings.tap(self.layer.index, Call(ran.seen, ran.kept, scale, softcap))
        return ran.out, ran.lse

    def _show(self, ran: Ran, kept: Selection, scale: float, softcap: float) -> None:
        settings, index = self.settings, self.layer.index
        if settings.see is not None:
            settings.see(index, kept)
        if settings.recorder is not None:

            def scores() -> Tensor:
                found = reference.tile_scores(ran.seen.q, ran.seen.k, self.policy, kept.geometry, scale)
                return each_head(found, kept.group)

            settings.recorder.write(index, kept, scores if settings.recorder.scores else None)
        if settings.eps is not None:
            tensors = (ran.seen.q, ran.seen.k, ran.seen.v)
            bounds = certify(
                *tensors, kept, scale=scale, backend=settings.backend, softcap=softcap, tiles=settings.certified_tiles
            )
            self.stats.add_certificate(bounds, settings.eps)


def original_name(implementation: str) -> str:
    return implementation.removeprefix(PREFIX)


def register(original: str) -> str:
    """The name of our implementation in place of `original`, registered with transformers on first use."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = PREFIX + original
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, mask_function(ALL_MASK_ATTENTION_FUNCTIONS.get(original)))
        AttentionInterface.register(name, forward)
    return name


def _original_function(module: Any, original: str) -> Callable[..., Any]:
    names = inspect.unwrap(type(module).forward).__globals__
    function: Callable[..., Any] = names["ALL_ATTENTION_FUNCTIONS"].get_interface(
        original, names.get("eager_attention_forward")
    )
    return function


def forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in the place of its own attention function."""
    state: AttachedLayer | None = module.__dict__.get(STATE)
    original = original_name(module.config._attn_implementation)
    bare = attention_mask is None and kwargs.get("sliding_window") is None and kwargs.get("is_causal") is not False
    if state is None or not (bare or is_segments(attention_mask)):
        # A mask that is not causal attention within sequences was made by the original's own mask function.
        if state is not None and state.reuse is not None and not torch.compiler.is_compiling():
            state.reuse.give_up()
        options = {"scaling": scaling, "dropout": dropout, **kwargs}
        options |= {} if softcap is None else {"softcap": softcap}
        options |= {} if s_aux is None else {"s_aux": s_aux}
        result: tuple[Tensor, Tensor | None] = _original_function(module, original)(
            module, query, key, value, attention_mask, **options
        )
        return result
    if module.training or (torch.is_grad_enabled() and query.requires_grad):
        raise ValueError(
            "a model attached to closecall is for inference: call model.eval() and run it under torch.no_grad(), "
            "or detach it to train"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True needs all attention weights, which closecall never has: detach first")
    if kwargs.get("cu_seq_lens_q") is not None:
        attention_mask = from_cu_seqlens(kwargs["cu_seq_lens_q"], query.shape[0], query.shape[2], key.shape[2])
    settings = state.settings
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if torch.compiler.is_compiling():
        below = state.dense_below(query.shape[2])
        out, lse = attention_op(
            query, key, value, attention_mask, state.policy_json, below, scale, softcap or 0.0,
            settings.backend, settings.group, next(iter(settings.generating.values()), settings.prompt_len),
        )  # fmt: skip
    else:
        out, lse = state.run(query, key, value, attention_mask, scale, softcap or 0.0)
    if s_aux is not None:  # a sink is one more key of that score and no value: it only takes its share of the sum
        share = torch.sigmoid(lse - s_aux.reshape(1, -1, 1).to(lse.dtype))
        out = (out * share[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None  # as the models' own functions: some call view() on it
