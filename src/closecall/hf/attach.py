"""`closecall.attach`: an existing Hugging Face model prefills sparsely, and nothing else about it changes.

How: the modules of full-attention layers, and the models that build masks for them, get copies of their configs that
name another attention implementation, `closecall_<the one before>`. transformers then calls our function and our mask
function for those layers. `detach` puts the original config objects back; no object of the model's is modified, and
what an attached layer does lives in its handle.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..backends import reference
from ..certify.certificate import certify
from ..policy import Policy, as_policy
from ..selection import Selection
from ..triggers.calibrated import layer_numbers
from .layers import Layer, find_layers
from .masks import from_cu_seqlens, is_segments, mask_function
from .op import Call, attention_op, heads_over, run
from .reuse import Reuse
from .stats import LayerStats, Recorder

OLDEST = (5, 0)
PREFIX = "closecall_"
# Below this multiple of the tile budget, the blocks that a policy leaves out do not pay for choosing them: see
# docs/benchmarks.md for the measurement.
BREAK_EVEN = 2
_NEVER = 2**62


class _State:
    """What one attached layer does. Kept on its module, outside of torch's bookkeeping."""

    def __init__(self, handle: Handle, layer: Layer, chosen: bool) -> None:
        self.handle = handle
        self.layer = layer
        self.chosen = chosen  # a full-attention layer not among layers= gets our masks, so it runs dense on our kernel
        self.policy = handle.policy.for_layer(layer.index)
        self.policy_json = self.policy.to_json()
        self.stats = LayerStats()
        self.reuse = Reuse() if chosen and self.policy.rule.needs_scores else None
        self._hook: Any = None
        if self.reuse is not None:
            self._hook = layer.module.register_forward_pre_hook(self.reuse.look, with_kwargs=True)

    def drop(self) -> None:
        """Takes it off its module."""
        self.layer.module.__dict__.pop("_closecall", None)
        if self._hook is not None:
            self._hook.remove()
        if self.reuse is not None:
            self.reuse.drop()

    def dense_below(self, rows: int) -> int:
        """The number of keys from which a call goes sparse: never for decode, unless asked."""
        handle = self.handle
        decode = rows < self.policy.tile and handle.decode == "dense"
        return handle.min_context if self.chosen and not decode else _NEVER


class Handle:
    """An attached model. `detach()` or leaving the `with` restores it; `print(handle)` shows what each layer does."""

    def __init__(
        self,
        model: Any,
        policy: Policy,
        layers: list[Layer],
        chosen: list[Layer],
        min_context: int,
        decode: Literal["dense", "sparse"],
    ) -> None:
        self.model = model
        self.policy = policy
        self.min_context = min_context
        self.decode = decode
        self.backend = "auto"  # or the name of one, as in closecall.attention
        self.layers = layers
        self._chosen = chosen
        self._states: list[_State] = []
        self._before: list[tuple[Any, Any]] = []  # (module, its own config object)
        self._recorder: Recorder | None = None
        self._see: Callable[[int, Selection], None] | None = None
        self._tap: Callable[[int, Call], None] | None = None
        self._eps: float | None = None
        self._group = _tensor_parallel_group(model)
        self._all_heads = heads_over(self._group)

    # -- attaching and detaching ---------------------------------------------------------------------------------------

    def _attach(self) -> None:
        full = [layer for layer in self.layers if layer.kind == "full"]
        originals = {id(layer.module.config): layer.module.config for layer in full}
        copies = {key: copy.copy(config) for key, config in originals.items()}
        for config in copies.values():
            config._attn_implementation_internal = _register(config._attn_implementation or "eager")
        left_alone = {id(layer.module) for layer in self.layers if layer.kind != "full"}
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if config is None or id(module) in left_alone:
                continue
            if id(config) not in copies:  # a composite model's config holds the one that changed
                held = [n for n in getattr(config, "sub_configs", {}) if id(getattr(config, n, None)) in originals]
                if not held:
                    continue
                copies[id(config)] = copy.copy(config)
                for name in held:
                    setattr(copies[id(config)], name, copies[id(getattr(config, name))])
            self._before.append((module, config))
            module.config = copies[id(config)]
        chosen = {id(layer) for layer in self._chosen}
        for layer in full:
            state = _State(self, layer, id(layer) in chosen)
            object.__setattr__(layer.module, "_closecall", state)
            self._states.append(state)

    def detach(self) -> None:
        """Restores the model exactly. Doing it twice does no harm."""
        for module, config in self._before:
            module.config = config
        for state in self._states:
            state.drop()
        self._before.clear()
        self.record_stop()
        self.watch(None)
        self.tap(None)
        self.certify(None)

    @property
    def attached(self) -> bool:
        return bool(self._before)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # -- what it did ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[int, dict[str, float | int]]:
        """Per attached layer, measured over everything run since attaching (calls inside torch.compile excepted)."""
        return {state.layer.index: state.stats.summary() for state in self._states}

    def record(self, directory: str | Path, *, scores: bool = False, max_bytes: int = 2**30) -> None:
        """From now on, writes every selection (with `scores`, tile scores too) to a new directory, up to max_bytes."""
        self._recorder = Recorder(directory, scores=scores, max_bytes=max_bytes)

    def record_stop(self) -> None:
        self._recorder = None

    def watch(self, see: Callable[[int, Selection], None] | None) -> None:
        """From now on, calls `see(layer, selection)` for every selection as it is made; None ends it."""
        self._see = see

    def tap(self, see: Callable[[int, Call], None] | None) -> None:
        """From now on, calls `see(layer, call)` after every call, dense ones too, with its tensors; None ends it."""
        self._tap = see

    def certify(self, eps: float | None = 0.1) -> None:
        """From now on, counts the rows that provably lost at most `eps` of their softmax mass; None ends it.

        `stats()` then has, as `certified`, their share of all (row, head) pairs of the calls that selected. That takes
        more time than the attention itself (see `closecall.certify`). A model's own attention sinks can only lower the
        loss.
        """
        if eps is not None and not 0 <= eps <= 1:
            raise ValueError(f"eps must be in [0, 1], a share of the softmax mass, or None, got {eps!r}")
        self._eps = eps

    def warnings(self, tokens: int) -> list[str]:
        """What a prompt of so many tokens does not get."""
        if not self.policy.rule.needs_scores or tokens >= self.min_context:
            return []
        return [f"{self.policy.name} ran dense: {tokens} tokens are below its {self.min_context}, where sparse may pay"]

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        attached = {id(layer) for layer in self._chosen}
        lines = [f"closecall on {type(self.model).__name__}: {self.policy}"]
        if self.min_context:
            lines.append(f"  dense below {self.min_context} keys")
        lines += [f"  {'layer':>5}  {'module':<{width}}  {'kind':<13}  what is done"]
        for layer in self.layers:
            if layer.kind != "full":
                done = f"left alone: {layer.note}"
            elif id(layer) not in attached:
                done = "dense, on our kernel: not among layers="
            else:
                done = "sparse" if self.policy.rule.needs_scores else "dense, on our kernel"
            number = layer.index if layer.index >= 0 else ""
            lines.append(f"  {number:>5}  {layer.name:<{width}}  {layer.kind:<13}  {done}")
        return "\n".join(lines)

    # -- the call ------------------------------------------------------------------------------------------------------

    def _run(
        self, state: _State, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        below = state.dense_below(q.shape[2])
        known = None if state.reuse is None else state.reuse.take(state.layer.index, q.shape[2], k)
        ran = run(q, k, v, segments, state.policy, below, scale, softcap, self.backend, self._all_heads, known)
        state.stats.calls += 1
        state.stats.select_seconds += ran.select_seconds
        state.stats.attend_seconds += ran.attend_seconds
        if ran.kept is not None:
            state.stats.add(ran.kept)
            if self._see is not None:
                self._see(state.layer.index, ran.kept)
            if self._recorder is not None:
                scores = None
                if self._recorder.scores:
                    scores = reference.tile_scores(ran.seen.q, ran.seen.k, state.policy, ran.kept.geometry, scale)
                self._recorder.write(state.layer.index, ran.kept, scores)
            if self._eps is not None:
                tensors = (ran.seen.q, ran.seen.k, ran.seen.v)
                found = certify(*tensors, ran.kept, scale=scale, backend=self.backend, softcap=softcap)
                state.stats.add_certificate(found, self._eps)
        if self._tap is not None:
            self._tap(state.layer.index, Call(ran.seen, ran.kept, scale, softcap))
        return ran.out, ran.lse


def originals_name(implementation: str) -> str:
    return implementation.removeprefix(PREFIX)


def _tensor_parallel_group(model: Any) -> str:
    """The name of the process group over which the model's heads are spread; empty for a model in one process."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) <= 1:
        return ""
    name: str = (mesh["tp"] if mesh.ndim > 1 else mesh).get_group().group_name
    return name


def _register(original: str) -> str:
    """The name of our implementation in place of `original`, registered with transformers on first use."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = PREFIX + original
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, mask_function(ALL_MASK_ATTENTION_FUNCTIONS.get(original)))
        AttentionInterface.register(name, _forward)
    return name


def _original_function(module: Any, original: str) -> Callable[..., Any]:
    names = inspect.unwrap(type(module).forward).__globals__
    function: Callable[..., Any] = names["ALL_ATTENTION_FUNCTIONS"].get_interface(
        original, names.get("eager_attention_forward")
    )
    return function


def _forward(
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
    state: _State | None = module.__dict__.get("_closecall")
    original = originals_name(module.config._attn_implementation)
    bare = attention_mask is None and kwargs.get("sliding_window") is None and kwargs.get("is_causal") is not False
    if state is None or not (bare or is_segments(attention_mask)):
        # A mask that is not causal attention within sequences was made by the original's own mask function.
        if state is not None and state.reuse is not None:
            state.reuse.drop()
        given = {"scaling": scaling, "dropout": dropout, **kwargs}
        given |= {} if softcap is None else {"softcap": softcap}
        given |= {} if s_aux is None else {"s_aux": s_aux}
        result: tuple[Tensor, Tensor | None] = _original_function(module, original)(
            module, query, key, value, attention_mask, **given
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
    handle = state.handle
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if torch.compiler.is_compiling():
        below = state.dense_below(query.shape[2])
        out, lse = attention_op(
            query, key, value, attention_mask, state.policy_json, below, scale, softcap or 0.0,
            handle.backend, handle._group,
        )  # fmt: skip
    else:
        out, lse = handle._run(state, query, key, value, attention_mask, scale, softcap or 0.0)
    if s_aux is not None:  # a sink is one more key of that score and no value: it only takes its share of the sum
        share = torch.sigmoid(lse - s_aux.reshape(1, -1, 1).to(lse.dtype))
        out = (out * share[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None  # as the models' own functions: some call view() on it


def _check_model(model: Any) -> None:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("attach needs transformers: pip install 'closecall[transformers]'") from error
    release = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if release is None or tuple(map(int, release.groups())) < OLDEST:
        raise ValueError(
            f"attach needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, not {transformers.__version__}: upgrade it"
        )
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model: attach works on causal decoders")
    if (getattr(model.config, "_attn_implementation", None) or "").startswith(PREFIX) or any(
        "_closecall" in module.__dict__ for module in model.modules()
    ):
        raise ValueError(f"this {type(model).__name__} is attached already: call detach() on its handle first")


def _choose_layers(layers: list[Layer], wanted: Sequence[int] | None, model: Any) -> list[Layer]:
    full = [layer for layer in layers if layer.kind == "full"]
    if not full:
        kinds = Counter(layer.kind for layer in layers)
        there = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none that closecall knows"
        raise ValueError(f"{type(model).__name__} has no full causal attention layer to make sparse; it has {there}")
    shared = {id(layer.module.config) for layer in full}
    for layer in layers:
        if layer.kind in ("other", "cross", "bidirectional") and id(layer.module.config) in shared:
            # It would be handed the masks made for its neighbours, and cannot read them.
            raise ValueError(f"{type(model).__name__}: {layer.name} cannot run beside attached layers: {layer.note}")
    if wanted is None:
        return full
    known = {layer.index: layer for layer in full}
    if not wanted:
        raise ValueError(f"layers is empty: full-attention layers are {sorted(known)}")
    for index in wanted:
        if index not in known:
            kind = next((layer.kind for layer in layers if layer.index == index), None)
            what = f"is {kind}" if kind else "does not exist"
            raise ValueError(f"layers: layer {index} {what}; full-attention layers are {sorted(known)}")
    return [known[index] for index in dict.fromkeys(wanted)]


def _check_budget(policy: Policy) -> None:
    """Now rather than in the middle of a long prefill, when a chunk happens to start off the block grid."""
    tile_budget = policy.rule.tile_budget
    if tile_budget is not None and tile_budget <= policy.most_forced:
        raise policy.no_room(policy.most_forced, f"blocks that a tile of {policy.tile} rows can be forced to keep")


def _check_layers(policy: Policy, layers: tuple[int, ...], model: str) -> None:
    """A policy fitted to a model's full-attention layers belongs to models that have the same ones."""
    made_for = policy.rule.made_for()
    if made_for is not None and made_for != layers:
        raise ValueError(
            f"the policy was calibrated for {layer_numbers(made_for)}, and the full attention of {model} is in "
            f"{layer_numbers(layers)}: run `closecall calibrate` on this model"
        )


def attach(
    model: Any,
    policy: Policy | str,
    *,
    layers: Sequence[int] | None = None,
    min_context: int | None = None,
    decode: Literal["dense", "sparse"] = "dense",
) -> Handle:
    """Makes a Hugging Face causal language model prefill by `policy`. Returns a handle, also a context manager.

    `layers`: indices of full-attention layers to attach to (all of them). `min_context`: with fewer keys than this the
    layer runs dense, on our kernel (0; for `auto`, the break-even point). `decode`: calls of fewer rows than a tile are
    decoding steps, `"dense"` by default; `"sparse"` selects for them too.
    """
    if decode not in ("dense", "sparse"):
        raise ValueError(f"decode must be 'dense' or 'sparse', got {decode!r}")
    if min_context is not None and (not isinstance(min_context, int) or min_context < 0):
        raise ValueError(f"min_context must be a whole number of keys, got {min_context!r}")
    chosen_policy = as_policy(policy)
    _check_model(model)
    found = find_layers(model)
    chosen = _choose_layers(found, layers, model)
    if chosen_policy.name == "auto" and min_context is None:
        min_context = BREAK_EVEN * (chosen_policy.rule.tile_budget or 0) * chosen_policy.block
    _check_budget(chosen_policy)
    _check_layers(chosen_policy, tuple(sorted(x.index for x in found if x.kind == "full")), type(model).__name__)
    handle = Handle(model, chosen_policy, found, chosen, min_context or 0, decode)
    try:
        handle._attach()
    except BaseException:
        handle.detach()
        raise
    return handle
