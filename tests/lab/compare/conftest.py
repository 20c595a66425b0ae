"""A tiny model with the probes' tokenizer, and a capture of a few prompts of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from closecall_lab.eval import statistics
from closecall_lab.eval.compare.capture import Capture, capture
from closecall_lab.eval.subject import Subject

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
TASKS = ("probe-needle", "probe-scattered:keys=8,questions=3")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, scaled up until attention is far from uniform, so that policies do differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from closecall_lab.probes.words import END, IDS, PAD, START, tokenizer

    settings: dict[str, Any] = {
        "vocab_size": len(IDS), "hidden_size": HEADS * DIM, "intermediate_size": 64, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 1024,
        "bos_token_id": IDS[START], "eos_token_id": IDS[END], "pad_token_id": IDS[PAD],
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, 0.3)
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def subject(tiny: Path) -> Subject:
    return Subject.open(str(tiny))


@pytest.fixture(scope="session")
def captured(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Two tasks, two prompts each: one of each part. Nobody writes into it."""
    directory = tmp_path_factory.mktemp("captured") / "tiny"
    assert capture(subject, directory, task_names=TASKS, contexts=(512,), n=2, say=lambda _: None) == 4
    return Capture.open(directory)


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals need not be smooth here; tests over up to nine contexts stay exact."""
    monkeypatch.setattr(statistics, "RESAMPLES", 999)


@pytest.fixture(autouse=True, scope="session")
def one_thread_for_processes_started_here() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
