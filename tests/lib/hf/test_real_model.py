"""SmolLM2-135M-Instruct (Q4_1 weights dequantised to float32), where `closecall get smollm2` has put it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import closecall
from closecall.models.fetch import fetched
from closecall.models.known.smollm2 import SOURCE
from closecall.models.load import LoadedModel, load_model
from families import assert_close

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not fetched(SOURCE), reason="`closecall get smollm2` first, as make test-model does"),
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2", dtype=torch.float32)


def prompt(loaded: LoadedModel, repeats: int) -> Any:
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * repeats
    needle = "The special magic number for harbor is 48213. "
    text = filler + needle + filler + "What is the special magic number for harbor mentioned in the text?"
    return loaded.tokenizer(loaded.prompt(text), return_tensors="pt", add_special_tokens=False)


@torch.no_grad()
def test_dense_policy_gives_sdpas_logits(loaded: LoadedModel) -> None:
    inputs = prompt(loaded, 6)
    own = loaded.model(**inputs).logits
    with closecall.attach(loaded.model, "dense"):
        ours = loaded.model(**inputs).logits
    exact = loaded.model.double()(**inputs).logits
    loaded.model.float()
    assert_close(ours, own, exact)


@torch.no_grad()
def test_sparse_generation_stays_coherent(loaded: LoadedModel) -> None:
    inputs = prompt(loaded, 24)
    assert inputs.input_ids.shape[1] > 1000
    policy = closecall.policy("router-on-quest", budget=3)
    with closecall.attach(loaded.model, policy) as handle:
        out = loaded.model.generate(**inputs, max_new_tokens=24, do_sample=False)
        stats = handle.stats()[0]
    answer = loaded.tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert "48213" in answer
    assert stats["kept_fraction"] < 0.8
