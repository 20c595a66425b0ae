"""What tests of several rooms share: tiny models with the probes' tokenizer, saved where any process can load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from closecall_lab.eval import statistics


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny model of a family, `Llama` say: 2 layers, 4 query heads of 16 on 2 key heads, 1024 tokens.

    Weights are random, and scaled up until attention is far from uniform, so that policies do answer differently.
    """

    def make(family: str) -> Path:
        import transformers

        from closecall_lab.probes.words import END, IDS, PAD, START, tokenizer

        settings: dict[str, Any] = {
            "vocab_size": len(IDS), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "bos_token_id": IDS[START], "eos_token_id": IDS[END], "pad_token_id": IDS[PAD],
        }  # fmt: skip
        config, model_class = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config(**settings))
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim == 2:
                        weight.normal_(0, 0.3)
        path = tmp_path_factory.mktemp("models") / "tiny"
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
        return path

    return make


@pytest.fixture
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws fewer bootstrap samples, for tests that print intervals and do not look at them."""
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
