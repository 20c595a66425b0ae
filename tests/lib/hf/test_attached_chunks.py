"""Attached models that prefill in chunks protect the tiles that end the prompt, and no chunk's own."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import closecall
import families
from families import tokens

POLICY = closecall.policy("last-tile-on-quest", factor="dense", block=8, tile=8, budget=5, tile_factor=1)


def watched(model: Any, run: Any, policy: closecall.Policy = POLICY, **given: Any) -> list[list[bool]]:
    """Of every selection that layer 0 made: which tiles were protected."""
    seen: list[list[bool]] = []
    with closecall.attach(model, policy, **given) as handle:
        handle.watch(lambda layer, kept: seen.append(kept.triggered[:, 0].any(0).tolist()) if layer == 0 else None)
        run(model, handle)
        assert handle.prompt_len is None
    return seen


def generate(model: Any, _: Any = None, batch: int = 1, length: int = 150, **given: Any) -> Any:
    x = tokens(batch, length)
    return model.generate(
        x, attention_mask=torch.ones_like(x), max_new_tokens=3, min_new_tokens=3, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **given,
    )  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_in_chunks(cache: str) -> None:
    model = families.model("llama")
    given = {"cache_implementation": cache} if cache == "static" else {}
    seen = watched(model, lambda m, h: generate(m, h, prefill_chunk_size=64, **given))
    assert [len(x) for x in seen] == [8, 8, 3]
    assert seen == [[False] * 8, [False] * 8, [False, False, True]]
    assert watched(model, generate) == [[False] * 18 + [True]]


def test_forward_calls_in_chunks_say_the_length() -> None:
    model = families.model("llama")
    x = tokens(1, 150)

    def run(m: Any, handle: closecall.Handle) -> None:
        logits = []
        for length in (150, None):
            cache = DynamicCache(config=m.config)
            handle.prompt_len = length
            logits.append(torch.cat([m(part, past_key_values=cache).logits for part in x.split(64, 1)], 1))
            if length:  # what is decoded is nobody's prompt
                m(x[:, :1], past_key_values=cache)
        assert not torch.equal(*logits)

    seen = watched(model, run, decode="sparse")
    assert seen == [
        *([False] * 8, [False] * 8, [False, False, True], [False]),
        *([False] * 7 + [True], [False] * 7 + [True], [False, False, True]),
    ]


def test_a_copied_model_has_its_own_and_detaching_leaves_none() -> None:
    model = copy.deepcopy(families.model("llama"))
    with closecall.attach(model, POLICY):
        twin = copy.deepcopy(model)
        assert twin._prefill.__self__ is twin
        one, two = (generate(m, prefill_chunk_size=64).logits for m in (model, twin))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert "_prefill" not in model.__dict__


def test_a_failing_prefill_forgets_the_length() -> None:
    model = families.model("llama")
    with closecall.attach(model, POLICY) as handle:
        hook = model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, prefill_chunk_size=64)
        hook.remove()
        assert handle.prompt_len is None
        with pytest.raises(ValueError, match=r"whole number of keys.*got -1"):
            handle.prompt_len = -1


def test_two_threads_generate_in_chunks() -> None:
    """The length of one thread's prompt is not that of another's."""
    model = families.model("llama")
    with closecall.attach(model, POLICY):
        lengths = (150, 220)
        alone = [generate(model, length=n, prefill_chunk_size=64).logits for n in lengths]
        inside: list[Any] = []

        def other() -> None:
            with torch.no_grad():
                inside.append(generate(model, length=lengths[1], prefill_chunk_size=64).logits)

        def start(*_: Any) -> None:
            hook.remove()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        hook = model.register_forward_pre_hook(start)
        mine = generate(model, prefill_chunk_size=64).logits
    for found, expected in zip((mine, inside[0]), alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
