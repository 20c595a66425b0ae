"""An attached model goes on from the summaries of its last call: the same logits bit for bit, whatever happens between.

Every test is a script of calls that runs twice, with and without them. What the last layer reused at each call shows
that it was worth it, or that what the cache holds was not trusted.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import closecall
import families
from calls import beams
from closecall.backends import cpu
from closecall.hf import forward
from closecall.hf.reuse import Reuse
from closecall.summaries import Summaries
from families import tokens

BLOCK = 16
POLICY = closecall.policy("router-on-quest", block=BLOCK, tile=BLOCK, budget=5, tile_factor=1, rho=1.4)

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(not cpu.tiers(), reason="no native code: nothing is kept"),
]


def empty(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def feed(model: Any, cache: Any, *sizes: int, seed: int = 0, **kwargs: Any) -> list[Tensor]:
    """Logits of so many random tokens at a call."""
    pieces = tokens(1, sum(sizes), seed=seed).split(list(sizes), 1)
    return [model(piece, past_key_values=cache, **kwargs).logits for piece in pieces]


def same_without(
    script: Callable[[Any], list[Tensor]], model: Any = None, policy: Any = POLICY, decode: Any = "sparse"
) -> list[int | None]:
    """What each call of the last layer reused; None where it was given no summaries. Checks that without them the
    script gives the same."""
    model = families.model("llama") if model is None else model
    given: list[Summaries | None] = []
    reused: list[int | None] = []
    take = Reuse.take

    def spy(*args: Any) -> Summaries | None:
        given.append(take(*args))
        return given[-1]

    def ran(*_: Any) -> None:
        last = given[-1] if given else None
        reused.append(None if last is None else last.reused)
        given.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reuse, "take", spy)
        with closecall.attach(model, policy, decode=decode) as handle:
            hook = handle._attached[-1].layer.module.register_forward_hook(ran)
            try:
                got = script(model)
            finally:
                hook.remove()
        patch.setattr(Reuse, "take", lambda *_: None)
        with closecall.attach(model, policy, decode=decode):
            expected = script(model)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    return reused


def blocks(*keys: int) -> list[int]:
    return [n // BLOCK for n in keys]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "qwen3_next"])
def test_chunked_prefill_and_sparse_decoding(name: str) -> None:
    reused = same_without(lambda m: feed(m, empty(m), 150, 37, 1, 1, 60, 16, 1, 1, 1), families.model(name))
    assert reused == [0, *blocks(150, 187, 188, 189, 249, 265, 266, 267)]


def test_keys_that_are_made_anew_from_what_the_cache_holds() -> None:
    reused = same_without(lambda m: feed(m, empty(m), 150, 37, 1), families.model("deepseek_v3"))
    assert reused == [None] * 3


@pytest.mark.parametrize(
    "policy",
    [
        closecall.policy("topk", block=BLOCK, tile=BLOCK, budget=5, tile_factor=1),
        POLICY.replace(scorer=closecall.SCORERS["outliers"](m=1, c=0.5), aggregate="softmax"),
        POLICY.replace(aggregate="mass"),
    ],
    ids=["mean", "boxed outliers", "mass"],
)
def test_policies(policy: closecall.Policy) -> None:
    reused = same_without(lambda m: feed(m, empty(m), 150, 50, 1, 1), policy=policy)
    assert reused == [0, *blocks(150, 200, 201)]


def test_generate() -> None:
    def script(model: Any) -> list[Tensor]:
        out = model.generate(
            tokens(1, 150), max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        return list(out.logits)

    assert same_without(script) == [0, *blocks(*range(150, 169))]


def test_dense_decoding_between_turns() -> None:
    """The tokens decoded densely are summarised with the next turn."""

    def script(model: Any) -> list[Tensor]:
        cache = empty(model)
        return [*feed(model, cache, 150), *feed(model, cache, *[1] * 20, seed=1), *feed(model, cache, 60, 60, seed=2)]

    assert same_without(script, decode="dense") == [0, *[0] * 20, 150 // BLOCK, 230 // BLOCK]


def test_a_cropped_cache() -> None:
    """Twice in a row, then other tokens in the place of those that are gone."""

    def script(model: Any) -> list[Tensor]:
        cache = empty(model)
        got = feed(model, cache, 150, 50)
        cache.crop(-20)
        cache.crop(-17)
        got += feed(model, cache, 37, 1, seed=1)
        cache.crop(-1)
        return got + feed(model, cache, 30, seed=2)

    assert same_without(script) == [0, *blocks(150, 163, 200, 200)]


def test_guesses() -> None:
    """Assisted decoding: several rows a call, and a cache that is cropped when a guess was wrong."""

    def script(model: Any) -> list[Tensor]:
        x = tokens(1, 30).repeat(1, 5)
        out = model.generate(
            x, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True,
            prompt_lookup_num_tokens=3,
        )  # fmt: skip
        return list(out.logits)

    reused = same_without(script)
    assert reused[0] == 0
    assert all(n is not None and n >= 150 // BLOCK for n in reused[1:])


def test_another_prompt_of_the_same_length() -> None:
    def script(model: Any) -> list[Tensor]:
        got = feed(model, empty(model), 150, 20)
        return got + feed(model, empty(model), 150, 20, seed=1)

    assert same_without(script) == [0, 150 // BLOCK, 0, 150 // BLOCK]


def test_two_caches_in_turn() -> None:
    def script(model: Any) -> list[Tensor]:
        one, two = empty(model), empty(model)
        got = feed(model, one, 150) + feed(model, two, 150, seed=1)
        for step in range(2):
            got += feed(model, one, 20, seed=2 + step) + feed(model, two, 20, 20, seed=4 + step)
        return got

    assert same_without(script) == [0, 0, 0, 0, 170 // BLOCK, 0, 0, 210 // BLOCK]


def test_a_copied_cache() -> None:
    def script(model: Any) -> list[Tensor]:
        one = empty(model)
        got = feed(model, one, 150)
        two = copy.deepcopy(one)
        return got + feed(model, one, 20) + feed(model, two, 20, seed=1) + feed(model, one, 20, seed=2)

    assert same_without(script) == [0, 150 // BLOCK, 0, 0]


def test_a_cache_that_was_reset() -> None:
    def script(model: Any) -> list[Tensor]:
        cache = empty(model)
        got = feed(model, cache, 150, 20)
        cache.reset()
        return got + feed(model, cache, 150, 20, seed=1)

    assert same_without(script) == [0, 150 // BLOCK, 0, 150 // BLOCK]


@pytest.mark.parametrize("how", ["written to", "replaced", "written to after a crop", "another part", "refilled"])
def test_keys_that_somebody_changed(how: str) -> None:
    """As many keys as there were, but others."""

    def script(model: Any) -> list[Tensor]:
        cache = empty(model)
        got = feed(model, cache, 150, 20)
        for layer in cache.layers:
            if how == "written to":
                layer.keys[:, :, 20:60] *= -1
            elif how == "replaced":
                layer.keys = layer.keys.flip(2)
            elif how == "written to after a crop":
                layer.keys, layer.values = layer.keys[:, :, :-5], layer.values[:, :, :-5]
                layer.keys[:, :, 20:60] *= -1
            elif how == "another part":
                layer.keys, layer.values = layer.keys[:, :, 20:], layer.values[:, :, 20:]
        if how == "refilled":  # by calls that we do not see: the mask is the caller's own, so the model's own code runs
            cache.crop(-140)
            sees = torch.ones(170, 170, dtype=torch.bool).tril()[30:]
            mask = torch.zeros(1, 1, 140, 170).masked_fill(~sees, torch.finfo(torch.float32).min)
            got += feed(model, cache, 140, seed=1, attention_mask=mask)
        return got + feed(model, cache, 30, 1, seed=2)

    kept = {"written to after a crop": 195, "another part": 180}.get(how, 200) // BLOCK
    reused = same_without(script)
    assert reused[:2] == [0, 150 // BLOCK]
    assert reused[-2:] == [0, kept]


def test_a_compiled_call_in_between() -> None:
    """It is not seen either."""

    def script(model: Any) -> list[Tensor]:
        torch.compiler.reset()
        cache = empty(model)
        got = feed(model, cache, 150, 20)
        cache.crop(-140)
        got += feed(torch.compile(model, backend="eager"), cache, 140, seed=1)
        return got + feed(model, cache, 30, 1, seed=2)

    reused = same_without(script)
    assert reused[:2] == [0, 150 // BLOCK]
    assert reused[-2:] == [0, 200 // BLOCK]
    torch.compiler.reset()


def test_batches_padding_and_beams_start_over() -> None:
    def batch(model: Any) -> list[Tensor]:
        cache, x = empty(model), tokens(2, 220)
        return [model(piece, past_key_values=cache).logits for piece in x.split([150, 69, 1], 1)]

    def padded(model: Any) -> list[Tensor]:
        cache, mask = empty(model), torch.ones(1, 220, dtype=torch.long)
        mask[0, :9] = 0
        got, at = [], 0
        for piece in tokens(1, 220).split([150, 69, 1], 1):
            at += piece.shape[1]
            positions = torch.arange(at - piece.shape[1], at)[None] - 9
            got += [
                model(piece, attention_mask=mask[:, :at], position_ids=positions.clamp(min=0), past_key_values=cache)
            ]
        return [out.logits[:, 9 if i == 0 else 0 :] for i, out in enumerate(got)]

    assert same_without(batch) == [None] * 3
    assert same_without(padded) == [0] * 3
    assert set(same_without(lambda m: list(beams(m, tokens(2, 150))))) == {None}


def test_a_batch_that_shrinks_to_its_second_row() -> None:
    def script(model: Any) -> list[Tensor]:
        cache = empty(model)
        got = feed(model, cache, 150, 20)
        cache.batch_repeat_interleave(2)
        got += [model(tokens(2, 20, seed=1), past_key_values=cache).logits]
        cache.batch_select_indices(torch.tensor([1]))
        return got + feed(model, cache, 30, 1, seed=2)

    assert same_without(script) == [0, 150 // BLOCK, None, 0, 220 // BLOCK]


def test_caches_of_other_kinds_start_over() -> None:
    def static(model: Any) -> list[Tensor]:
        return feed(model, StaticCache(config=model.config, max_cache_len=230), 150, 20, 1)

    class Negating(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            keys, values = super().update(*args, **kwargs)
            keys.neg_()
            return keys, values

    assert same_without(static) == [None] * 3
    assert same_without(lambda m: feed(m, Negating(config=m.config), 150, 20, 1)) == [None] * 3
    assert same_without(lambda m: [m(tokens(1, n), use_cache=False).logits for n in (150, 151)]) == [None] * 2


def test_inference_mode_starts_over() -> None:
    """There torch does not count what is written to a tensor."""

    def script(model: Any) -> list[Tensor]:
        with torch.inference_mode():
            return feed(model, empty(model), 150, 20, 1)

    assert same_without(script) == [None] * 3


def test_another_threads_call_meanwhile_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of every call of one thread, another runs whole prompts of its own through the model."""
    model = families.model("llama")

    def script(seed: int) -> list[Tensor]:
        return feed(model, empty(model), 150, 40, 40, 1, seed=seed)

    with closecall.attach(model, POLICY, decode="sparse"):
        alone = [script(0), script(1)]
        there, others, plain = threading.local(), [], forward.run

        def run(*args: Any) -> Any:
            if getattr(there, "is_other", False):
                return plain(*args)

            def other() -> None:
                there.is_other = True
                with torch.no_grad():
                    others.append(script(1))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return plain(*args)

        monkeypatch.setattr(forward, "run", run)
        mine = script(0)
        monkeypatch.setattr(forward, "run", plain)
        again = script(0)
    for found, expected in [(mine, alone[0]), (again, alone[0]), *((one, alone[1]) for one in others)]:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(others) == 4 * len(model.model.layers)


def test_layers_that_are_not_sparse_keep_nothing() -> None:
    model = families.model("llama")
    with closecall.attach(model, POLICY, layers=[1], decode="sparse") as handle:
        feed(model, empty(model), 150, 1)
        assert [state.reuse is not None for state in handle._attached] == [False, True, False]
    with closecall.attach(model, "dense") as handle:
        assert not any(state.reuse for state in handle._attached)


def test_nothing_is_held_and_nothing_is_left() -> None:
    model, handles = families.model("llama"), []
    with closecall.attach(model, POLICY, decode="sparse") as handle:
        handles.append(handle)
        cache = empty(model)
        feed(model, cache, 150, 20)
        keys = [weakref.ref(layer.keys) for layer in cache.layers]
        summaries = [state.reuse.summaries for state in handle._attached if state.reuse is not None]
        assert all(s.nbytes for s in summaries)
        del cache
        gc.collect()
        assert not any(ref() is not None for ref in keys)
        copied = copy.deepcopy(handle._attached[0].reuse)
        assert copied is not None
        assert copied.summaries.nbytes == 0
        assert isinstance(pickle.loads(pickle.dumps(copied)), Reuse)
    assert not any(s.nbytes for s in summaries)
    assert not any(module._forward_pre_hooks for module in model.modules())
