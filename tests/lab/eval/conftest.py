"""A tiny model with the probes' tokenizer, saved where any process can load it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TRAINED = 1024


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, scaled up until attention is far from uniform, so that policies do answer differently."""
    from transformers import GraniteConfig, GraniteForCausalLM

    from closecall_lab.probes.words import END, IDS, PAD, START, tokenizer

    settings: dict[str, Any] = {
        "vocab_size": len(IDS), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TRAINED,
        "bos_token_id": IDS[START], "eos_token_id": IDS[END], "pad_token_id": IDS[PAD],
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GraniteForCausalLM(GraniteConfig(**settings))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, 0.3)
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True, scope="session")
def processes_like_this_one() -> None:
    """Processes started by tests, Ray's among them, import what the tests import, and use one thread each."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    os.environ["OMP_NUM_THREADS"] = "1"
    assert sys.executable
