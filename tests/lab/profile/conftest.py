"""A tiny model on disk, tiny shapes, and the command line with only the commands under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from closecall import cli
from closecall.models.catalogue import shape as gpu_shape
from closecall.models.entry import Shape
from closecall_lab.bench.profile.cli import COMMANDS

Command = Callable[..., int]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring memory collects garbage first, which takes longer than a tiny layer."""
    monkeypatch.setattr("closecall_lab.spine.memory.mark", lambda: None)


@pytest.fixture
def command() -> Command:
    root = cli.Parser(prog="closecall")
    commands = root.add_subparsers()
    for add in COMMANDS:
        add(commands)
    return lambda *argv: cli.guarded(root, [str(x) for x in argv])


@pytest.fixture
def small() -> Shape:
    """Llama's layer, 3 of them, shrunk: 6 query heads on 2 key heads."""
    return replace(
        gpu_shape("llama-3.1-8b"), layers=3, full_layers=3, hidden=96, intermediate=64, q_heads=6, kv_heads=2,
        head_dim=16, weights=3 * (96 * 16 * 16 + 3 * 96 * 64),
    )  # fmt: skip


@pytest.fixture
def hybrid() -> Shape:
    """Qwen3.6's layers, 4 of them, one with full attention, shrunk."""
    return replace(
        gpu_shape("qwen3.6-35b"), layers=4, full_layers=1, hidden=32, q_heads=4, kv_heads=2, head_dim=32, weights=1e5
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=32, max_position_embeddings=512, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w2"))
    directory = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(directory)
    return directory
