"""Every way people call a model gives what the model's own attention gives, and sparse what the reference gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import closecall
import families
from calls import CALLS, LENGTH, PACKED, generate, left_padding, padded
from closecall.hf.masks import mask_function, segment_ids
from engines import pairs
from families import Float64, assert_close, tokens

EVERYTHING = closecall.policy("topk", block=16, tile=16, budget=32)
SMALL = closecall.policy("router-on-quest", block=16, tile=16, budget=5, tile_factor=1, rho=1.4)
MODELS = ("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next")
# What transformers itself refuses.
IMPOSSIBLE = {("qwen3_next", "assisted")}
OF_ALL_FAMILIES = ("left_padding", "right_padding", "generate")  # test_families.py has them
CASES = [(m, c) for m in MODELS for c in CALLS if (m, c) not in IMPOSSIBLE]

pytestmark = pytest.mark.usefixtures("inference")


def sparse(model: Any, call: str, backend: str = "auto", decode: str = "sparse") -> torch.Tensor:
    with closecall.attach(model, SMALL, decode=decode) as handle:
        handle.backend = backend
        return CALLS[call](model, tokens(2, LENGTH))


@pytest.mark.parametrize(("name", "call"), [(m, c) for m, c in CASES if c not in OF_ALL_FAMILIES])
def test_a_budget_that_covers_everything_equals_eager(name: str, call: str) -> None:
    with closecall.attach(families.model(name), EVERYTHING) as handle:
        got = CALLS[call](families.model(name), tokens(2, LENGTH))
        ran = [layer["calls"] for layer in handle.stats().values()]
    # A mask that is no causal one is the model's own business; everything else is ours.
    assert all(ran) != (call == "own_mask")
    assert_close(got, *families.expected(name, CALLS[call], LENGTH))


# Each call with every second model, the others in the next call. All families are in test_families.py.
SPARSE = pairs(MODELS, [c for c in CALLS if c != "own_mask"], lambda i, j: (i + j) % 2 == 0)


@pytest.mark.parametrize(("name", "call"), [case for case in SPARSE if case not in IMPOSSIBLE])
def test_a_small_budget_equals_the_reference_backend(name: str, call: str) -> None:
    model = families.model(name)
    got, rounded = sparse(model, call), sparse(model, call, "reference")
    with Float64():
        wanted = sparse(families.exact(name), call, "reference")
    assert_close(got, rounded, wanted)
    assert float((got - CALLS[call](model, tokens(2, LENGTH))).abs().max()) > 0.01  # something was left out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("call", [left_padding, generate])
def test_half_precision(name: str, dtype: torch.dtype, call: Any) -> None:
    model = copy.deepcopy(families.model(name)).to(dtype)
    eager, exact = families.as_eager(model), families.as_eager(model).double()
    x = tokens(2, LENGTH)
    # One step: greedy tokens may part where precision is low.
    steps = {} if call is left_padding else {"max_new_tokens": 1, "min_new_tokens": 1}
    with closecall.attach(model, EVERYTHING):
        got = call(model, x, **steps)
    rounded = call(eager, x, **steps)
    with Float64():
        wanted = call(exact, x, **steps)
    assert got.dtype in (dtype, torch.float32)  # generate returns float32 logits
    assert_close(got, rounded, wanted)


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "gpt_neox"])
@pytest.mark.parametrize("policy", [EVERYTHING, SMALL], ids=["everything", "small"])
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_equal_each_alone(name: str, policy: closecall.Policy, how: str) -> None:
    model, x = families.model(name), tokens(1, LENGTH)
    position = torch.cat([torch.arange(n) for n in PACKED])[None]
    kwargs: dict[str, Any] = {"position_ids": position, "use_cache": False}
    if how == "cu_seq_lens":
        bounds = torch.tensor([0, *PACKED]).cumsum(0).int()
        # With a mask of ones, transformers looks for no restarts: the bounds alone say where sequences begin.
        kwargs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "attention_mask": torch.ones_like(x)}
        kwargs |= {"max_length_q": max(PACKED), "max_length_k": max(PACKED), "use_cache": True}
    with closecall.attach(model, policy) as handle:
        got = model(x, **kwargs).logits
        alone = torch.cat([model(part).logits for part in x.split(PACKED, 1)], 1)
        handle.backend = "reference"
        rounded = torch.cat([model(part).logits for part in x.split(PACKED, 1)], 1)
    with Float64(), closecall.attach(families.exact(name), policy) as handle:
        handle.backend = "reference"
        wanted = torch.cat([families.exact(name)(part).logits for part in x.split(PACKED, 1)], 1)
    assert_close(got, rounded, wanted)
    assert_close(alone, rounded, wanted)


def test_cu_seq_lens_with_a_cache_that_holds_keys_is_refused() -> None:
    model, x = families.model("llama"), tokens(1, 60)
    bounds = torch.tensor([0, 20, 40], dtype=torch.int32)
    with closecall.attach(model, EVERYTHING):
        cache = model(x[:, :20], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"empty cache.*40 rows and 60 keys"):
            model(x[:, 20:], past_key_values=cache, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


def test_a_neighbour_in_the_batch_changes_nothing() -> None:
    model, exact, x = families.model("qwen3"), families.exact("qwen3"), tokens(2, LENGTH)
    mask = padded(x, "left")
    # As generate does it. Scores of rotated keys depend on where the positions start, if only in what is left out.
    position = (mask.cumsum(1) - 1).clamp(min=0)

    def alone(m: Any, backend: str) -> torch.Tensor:
        with closecall.attach(m, SMALL) as handle:
            handle.backend = backend
            return torch.cat([m(row[real.bool()][None]).logits[0] for row, real in zip(x, mask, strict=True)])

    with closecall.attach(model, SMALL):
        together = model(x, attention_mask=mask, position_ids=position).logits[mask.bool()]
    with Float64():
        wanted = alone(exact, "reference")
    assert_close(together, alone(model, "reference"), wanted)


def test_tokens_that_look_ahead_keep_the_models_own_attention() -> None:
    """Image tokens see each other: the mask of a multimodal prompt."""
    from transformers.masking_utils import create_causal_mask

    model, eager, x = families.model("llama"), families.eager("llama"), tokens(1, 64)
    groups = torch.full_like(x, -1)
    groups[:, 10:30] = 0

    def run(m: Any) -> torch.Tensor:
        embeds = m.model.embed_tokens(x)
        mask = create_causal_mask(m.config, embeds, None, None, block_sequence_ids=groups)
        return m(inputs_embeds=embeds, attention_mask=mask).logits

    with closecall.attach(model, EVERYTHING) as handle:
        got = run(model)
        assert all(layer["calls"] == 0 for layer in handle.stats().values())
    with Float64():
        wanted = run(families.exact("llama"))
    assert_close(got, run(eager), wanted)
    causal = eager(x).logits
    assert float((causal - got).abs().max()) > 0.01


def test_a_users_mask_function_keeps_the_models_own_attention() -> None:
    from transformers.masking_utils import create_causal_mask

    model, eager, x = families.model("llama"), families.eager("llama"), tokens(1, 64)

    def run(m: Any) -> torch.Tensor:
        embeds = m.model.embed_tokens(x)

        def prefix(batch: Any, head: Any, q: Any, kv: Any) -> Any:
            return kv < 20  # a prefix that everybody sees

        mask = create_causal_mask(m.config, embeds, None, None, or_mask_function=prefix)
        return m(inputs_embeds=embeds, attention_mask=mask).logits

    with closecall.attach(model, EVERYTHING):
        got = run(model)
    with Float64():
        wanted = run(families.exact("llama"))
    assert_close(got, run(eager), wanted)


def test_segment_ids() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    ids = segment_ids(2, 2, 6, 2, mask, None, "cpu")
    assert ids.tolist() == [[0, 1, 1, 1, -1, -1], [1, 1, 1, 0, -1, -1]]
    assert mask_function(None)(1, 3, 3).tolist() == [[1, 1, 1]]


def test_linear_first_minimax_generates_like_detached() -> None:
    """Its mask is sized by the first layer, which has no keys; sdpa happens to need none for one sequence."""
    kinds = ["linear_attention", "full_attention", "full_attention"]
    model = families.build(families.config("minimax", layer_types=kinds))
    x = tokens(1, 60)
    own = generate(model, x, attention_mask=torch.ones_like(x))
    with closecall.attach(model, EVERYTHING):
        torch.testing.assert_close(generate(model, x, attention_mask=torch.ones_like(x)), own, rtol=0, atol=1e-4)
        with pytest.raises(ValueError, match=r"prompts of one length"):
            generate(model, tokens(2, LENGTH))
