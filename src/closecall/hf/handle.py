"""The handle of an attached model: puts our attention into its layers, takes it out again, and says what it did."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ..checks import check_prompt_len, check_tiles, is_number
from ..policy import Policy
from ..selection import Selection
from .forward import STATE, AttachedLayer, Settings, register
from .generate import see_generate, see_generate_no_more
from .layers import Layer
from .op import Call, heads_over
from .stats import Recorder, Stats

CERTIFIED_TILES = 8


class Handle:
    """An attached model. `detach()` or leaving the `with` restores it.

    `print(handle)` shows what each layer does, `print(handle.stats())` what it did.
    """

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
        self.layers = layers
        group = _tensor_parallel_group(model)
        self._settings = Settings(policy, min_context, decode, group, heads_over(group))
        self._chosen = chosen
        self._attached: list[AttachedLayer] = []
        self._before: list[tuple[Any, Any]] = []  # (module, its own config object)
        self._named: list[tuple[Any, str]] = []  # (copy of a config, the implementation of ours that it names)

    @property
    def policy(self) -> Policy:
        return self._settings.policy

    @property
    def min_context(self) -> int:
        """With fewer keys than this the model runs dense."""
        return self._settings.min_context

    @property
    def decode(self) -> Literal["dense", "sparse"]:
        return self._settings.decode

    @property
    def backend(self) -> str:
        """`"auto"`, or the name of one, as in `closecall.attention`; may be set at any time."""
        return self._settings.backend

    @backend.setter
    def backend(self, name: str) -> None:
        self._settings.backend = name

    @property
    def prompt_len(self) -> int | None:
        """How many keys a prompt will have in all, padding and cached keys included, if you pass it in chunks.

        Set it before the first chunk (to any large number while the length is unknown), and to None after the last.
        `generate(prefill_chunk_size=...)` needs none of this. See `closecall.attention`.
        """
        return self._settings.prompt_len

    @prompt_len.setter
    def prompt_len(self, keys: int | None) -> None:
        check_prompt_len(keys, 0)
        self._settings.prompt_len = keys

    # -- attaching and detaching ---------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Gives the full-attention modules, and what builds masks for them, copies of their configs that name ours."""
        full = [layer for layer in self.layers if layer.kind == "full"]
        originals = {id(layer.module.config): layer.module.config for layer in full}
        copies = {key: copy.copy(config) for key, config in originals.items()}
        for config in copies.values():
            config._attn_implementation_internal = register(config._attn_implementation or "eager")
            self._named.append((config, config._attn_implementation))
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
            state = AttachedLayer(self._settings, layer, id(layer) in chosen)
            object.__setattr__(layer.module, STATE, state)
            self._attached.append(state)
        see_generate(self.model)

    def detach(self) -> None:
        """Restores the model exactly, and warns if the policy never cut anything. Calling it twice is harmless."""
        self._restore(warn=True)

    def _restore(self, *, warn: bool) -> None:
        complaint = (self._replaced() or self._never_sparse()) if warn and self.attached else None
        for module, config in self._before:
            module.config = config
        for state in self._attached:
            state.drop()
        see_generate_no_more(self.model)
        self._before.clear()
        self._named.clear()
        settings = self._settings
        settings.recorder = settings.see = settings.tap = settings.eps = None
        if complaint is not None:
            warnings.warn(complaint, stacklevel=3)

    @property
    def attached(self) -> bool:
        return bool(self._before)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._restore(warn=error is None)

    def _must_be_attached(self, what: str) -> None:
        if not self.attached:
            raise ValueError(f"{what}: the model was detached, so there is nothing to see; attach it again first")

    # -- what it did ---------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Per attached layer, measured over everything run since attaching (calls inside torch.compile excepted).

        A dict by layer; as text, a table with a total.
        """
        return Stats({state.layer.index: state.stats for state in self._attached}, self.policy)

    def record(self, directory: str | Path, *, scores: bool = False, max_bytes: int = 2**30) -> None:
        """From now on, writes every selection (with `scores`, tile scores too) to a new directory, up to max_bytes."""
        self._must_be_attached("record")
        self._settings.recorder = Recorder(directory, scores=scores, max_bytes=max_bytes)

    def record_stop(self) -> None:
        self._settings.recorder = None

    def watch(self, see: Callable[[int, Selection], None] | None) -> None:
        """From now on, calls `see(layer, selection)` for every selection as it is made; None ends it."""
        if see is not None:
            _must_be_callable("watch", see)
            self._must_be_attached("watch")
        self._settings.see = see

    def tap(self, see: Callable[[int, Call], None] | None) -> None:
        """From now on, calls `see(layer, call)` after every call, dense ones too, with its tensors; None ends it."""
        if see is not None:
            _must_be_callable("tap", see)
            self._must_be_attached("tap")
        self._settings.tap = see

    def certify(self, eps: float | None = 0.1, *, tiles: int | None = CERTIFIED_TILES) -> None:
        """From now on, counts the rows that provably lost at most `eps` of their softmax mass; None ends it.

        `stats()` then has, as `certified`, their share of the (row, head) pairs examined. Those are the rows of `tiles`
        tiles of every call and sequence, evenly spread, the last one included. Examining all (`tiles=None`) takes far
        longer than the attention itself, and ever longer with the context (see `closecall.certify`). A model's own
        attention sinks can only lower the loss.
        """
        if eps is not None and not (is_number(eps) and 0 <= eps <= 1):
            raise ValueError(f"eps must be in [0, 1], a share of the softmax mass, or None, got {eps!r}")
        check_tiles(tiles)
        if eps is not None:
            self._must_be_attached("certify")
        self._settings.eps = eps
        self._settings.certified_tiles = tiles

    def warnings(self, tokens: int) -> list[str]:
        """What a prompt of so many tokens does not get."""
        reason = self._dense_because(tokens)
        return [] if reason is None else [f"{self.policy.name} ran dense: {reason}"]

    def _dense_because(self, tokens: int) -> str | None:
        """Why a prompt of so many tokens is not cut; None if it is."""
        policy = self.policy
        if not policy.rule.needs_scores:
            return None
        if tokens < self.min_context:
            return f"the prompt has {tokens:,} tokens, and it begins to cut at {self.min_context:,}"
        budget = policy.rule.tile_budget
        if budget is not None and budget * policy.block >= tokens:
            keys = budget * policy.block
            return f"the prompt has {tokens:,} tokens, and a tile may keep {budget} blocks, which hold {keys:,}"
        return None

    def _replaced(self) -> str | None:
        """The warning for a model that was given another attention while it was attached."""
        others = {config._attn_implementation for config, ours in self._named if config._attn_implementation != ours}
        if not others:
            return None
        name = repr(min(map(str, others)))
        return (
            f"the attention of {type(self.model).__name__} was set to {name} while it was attached, and closecall did "
            f"not run since; it has its own again now: for {name}, call set_attn_implementation({name}) after detach()"
        )

    def _never_sparse(self) -> str | None:
        """The warning for a policy that could cut and never did."""
        layers = [state.stats for state in self._attached if state.chosen]
        longest = max((layer.longest for layer in layers), default=0)
        if not longest or any(layer.sparse_calls for layer in layers):
            return None
        reason = self._dense_because(longest)
        return None if reason is None else f"{self.policy.name} never cut anything: {reason}. {self._remedy(longest)}"

    def _remedy(self, tokens: int) -> str:
        """A budget that would cut a prompt of so many tokens: an eighth of its blocks."""
        policy, factor = self.policy, self.policy.rule.tile_factor
        tile_budget = max(policy.most_forced + 1, tokens // (8 * policy.block))
        if factor is None or 2 * tile_budget * policy.block > tokens:
            return "Longer prompts are what it is for"
        remedy = f"For prompts of this length try budget={max(1, round(tile_budget / factor))}"
        now = policy.rule.tile_budget
        return f"{remedy}, or pass min_context=0" if now is not None and now * policy.block < tokens else remedy

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


def _must_be_callable(what: str, see: object) -> None:
    if not callable(see):
        raise TypeError(f"{what} takes a function of (layer, what was seen), or None, got {type(see).__name__}")


def _tensor_parallel_group(model: Any) -> str:
    """The name of the process group over which the model's heads are spread; empty for a model in one process."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) <= 1:
        return ""
    name: str = (mesh["tp"] if mesh.ndim > 1 else mesh).get_group().group_name
    return name
