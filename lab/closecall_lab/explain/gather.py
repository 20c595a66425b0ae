"""Runs a prompt once per policy and gathers, layer by layer as the model goes, all that the page shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from closecall.geometry import Geometry, plan
from closecall.hf.attach import Handle, attach
from closecall.hf.op import Call
from closecall.policy import Policy

from ..spine.last_row import last_row
from .codes import Cells, Floats
from .look import Calls, Looked, Question, look, pool_of
from .prompt import Prompt

Say = Callable[[str], None]


@dataclass(eq=False)
class Run:
    """What one policy made of the prompt."""

    policy: Policy
    label: str
    layers: list[Looked]
    calls: Calls
    mean: dict[str, Floats]  # `[cells]`: over all layers and heads
    output: str  # what the model then wrote
    stopped: int  # after so many tokens, because it was not let write more; 0 where it ended by itself
    dense: str  # why nothing was left out; empty where something was

    @property
    def heads(self) -> int:
        return int(self.layers[0].counts.shape[0])


@dataclass(eq=False)
class Gathered:
    """One prompt under one or two policies, on one grid of blocks and tiles."""

    model: str
    prompt: Prompt
    geometry: Geometry
    cells: Cells
    asking: tuple[int, ...]
    answer: tuple[int, ...]
    truth: bool
    runs: list[Run]


class _Watch:
    """Takes every layer's call on the whole prompt, and lets decoding steps pass."""

    def __init__(self, tokens: int, policy: Policy, question: Question, wanted: Sequence[int] | None, say: Say) -> None:
        self.tokens = tokens
        self.policy = policy
        self.question = question
        self.wanted = wanted
        self.say = say
        self.layers: list[Looked] = []
        self.calls = Calls()
        self.sums: dict[str, Floats] = {}
        self._of = 0
        self._begin = time.monotonic()

    def follow(self, handle: Handle) -> None:
        full = [layer.index for layer in handle.layers if layer.kind == "full"]
        for index in self.wanted or ():
            if index not in full:
                raise ValueError(f"layer {index} has no full attention to show; those that have are {_ranges(full)}")
        self._of = len(full if self.wanted is None else set(self.wanted))
        handle.tap(self.see)

    def see(self, layer: int, call: Call) -> None:
        g = call.seen.geometry
        if g.q_len < self.tokens and g.k_len > self.tokens:
            return  # the answer is being written
        if not g.whole or g.batch != 1 or g.q_len != self.tokens or g.k_len != self.tokens:
            raise ValueError(f"layer {layer} did not get the whole prompt in one call: explain one at a time")
        if self.wanted is not None and layer not in self.wanted:
            return
        looked = look(layer, call, self.policy.for_layer(layer), self.question)
        for name, values in looked.sums.items():
            self.sums[name] = self.sums.get(name, 0) + values
        looked.sums = {}
        self.calls.merge(looked.calls)
        self.layers.append(looked)
        self.say(f"layer {len(self.layers)} of {self._of}, {time.monotonic() - self._begin:.0f} s")

    def mean(self) -> dict[str, Floats]:
        maps = sum(layer.counts.shape[0] for layer in self.layers)
        return {name: values / maps for name, values in self.sums.items()}


def _ranges(numbers: Sequence[int]) -> str:
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


@torch.no_grad()
def run(
    model: Any, tokenizer: Any | None, prompt: Prompt, policy: Policy, label: str, question: Question, *,
    layers: Sequence[int] | None, new_tokens: int, say: Say,
) -> Run:  # fmt: skip
    """Prefills the prompt by the policy, looks at every layer, and lets the model answer."""
    tokens = len(prompt.ids)
    watch = _Watch(tokens, policy, question, layers, lambda text: say(f"{label}: {text}"))
    with attach(model, policy) as handle:
        watch.follow(handle)
        ids = torch.tensor([prompt.ids], device=model.device)
        if new_tokens and tokenizer is not None:
            written, ended = _generate(model, ids, new_tokens)
            output, stopped = str(tokenizer.decode(written, skip_special_tokens=True)), 0 if ended else len(written)
        else:
            model(ids, logits_to_keep=last_row(model), use_cache=False)
            output, stopped = "", 0
        notes = handle.warnings(tokens)
    if not watch.layers:
        raise ValueError(f"{type(model).__name__} ran no full attention over the prompt: there is nothing to show")
    cut = any(layer.scores for layer in watch.layers)
    return Run(
        policy=policy,
        label=label,
        layers=sorted(watch.layers, key=lambda found: found.layer),
        calls=watch.calls,
        mean=watch.mean(),
        output=output.strip(),
        stopped=stopped,
        dense="" if cut else _why_dense(policy, notes),
    )


def _generate(model: Any, ids: torch.Tensor, most: int) -> tuple[list[int], bool]:
    """The tokens of a greedy answer, whatever the model's own settings say about sampling, and whether it ended."""
    plain = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, pad_token_id=0, **plain)
    written = [int(token) for token in out[0, ids.shape[1] :]]
    named = model.generation_config.eos_token_id
    ends = named if isinstance(named, (list, tuple)) else [named]
    return written, len(written) < most or written[-1] in ends


def _why_dense(policy: Policy, notes: Sequence[str]) -> str:
    """What the handle says of a prompt that it ran dense; of a policy that is dense it has nothing to say."""
    return f"{notes[0]}." if notes else f"{policy.name} keeps every block by design: nothing was left out."


def gather(
    model: Any, tokenizer: Any | None, name: str, prompt: Prompt, policies: Sequence[tuple[str, Policy]], *,
    layers: Sequence[int] | None = None, truth: bool = True, new_tokens: int = 32, say: Say = lambda text: None,
) -> Gathered:  # fmt: skip
    """The prompt under each policy. `truth`: with what every block really holds, which takes dense attention."""
    first = policies[0][1]
    if not 1 <= len(policies) <= 2:
        raise ValueError(f"explain shows one policy, or two side by side, got {len(policies)}")
    for label, policy in policies[1:]:
        if (policy.block, policy.tile) != (first.block, first.tile):
            raise ValueError(
                f"two maps can be laid over each other only on one grid: {policies[0][0]} has blocks of {first.block} "
                f"keys and tiles of {first.tile} rows, {label} has {policy.block} and {policy.tile}"
            )
    tokens = len(prompt.ids)
    geometry = plan(1, tokens, tokens, first.block, first.tile)
    cells = Cells(geometry.visible[0].numpy().astype(np.int64), geometry.n_blocks, pool_of(geometry))
    asking, answer = tuple(prompt.asking_tiles(first.tile)), tuple(prompt.answer_blocks(first.block))
    question = Question(cells, asking, answer, truth)
    runs = [
        run(model, tokenizer, prompt, policy, label, question, layers=layers, new_tokens=new_tokens, say=say)
        for label, policy in policies
    ]
    return Gathered(name, prompt, geometry, cells, asking, answer, truth, runs)
