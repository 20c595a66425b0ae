"""What the probes look like inside: two families, three small layers each, and how their weights start."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from closecall.registry import unknown

from .words import END, IDS, PAD, START, VOCABULARY

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # normalises queries and keys per head
}
POSITIONS = 36_864  # positions seen in training: 32K tokens, and room for questions and answers
LOOK_BACK = (1, 2, 1, 2)  # tokens each head of the first layer starts out looking back
AMPLITUDE = 6.0  # of a pair of coordinates in those heads' biases
SLOWEST = 2.0 / POSITIONS  # slower rotations than this (per position) are left to content


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a probe, 0.72M parameters; `changes` are for smaller ones in tests."""
    if name not in FAMILIES:
        raise unknown("probe", name, FAMILIES)
    shape: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e8},
        "tie_word_embeddings": True,
        "attention_bias": True,  # Qwen2 has them always; with QK-Norm the first layer needs them for its start
        "bos_token_id": IDS[START],
        "eos_token_id": IDS[END],  # a full stop ends an answer
        "pad_token_id": IDS[PAD],
    }
    if name == "qwen2":
        del shape["attention_bias"]
    return FAMILIES[name][0](**(shape | changes))


def create(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A fresh probe in float32, the same for the same seed. The caller's random state is left as it was."""
    shape = config(name, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[name][1](shape)
    _look_back(model)
    return model


@torch.no_grad()
def _look_back(model: PreTrainedModel) -> None:
    """Lets the first layer's heads begin by looking one or two tokens back.

    Finding an entry takes a key token that knows what stood two tokens before it, and a query that knows what stood one
    before. That a model discovers this by itself is what takes longest, so the biases of q and k start as what rotary
    positions turn into a peak at that distance: equal keys, and queries rotated back by it.
    """
    settings = model.config
    attention = model.model.layers[0].self_attn
    half = settings.head_dim // 2
    frequency = settings.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    amplitude = torch.where(frequency > SLOWEST, AMPLITUDE, 0.0)
    k = torch.cat([amplitude, torch.zeros(half)])
    attention.k_proj.bias.copy_(k.repeat(settings.num_key_value_heads))
    q = []
    for head in range(settings.num_attention_heads):
        angle = frequency * LOOK_BACK[head % len(LOOK_BACK)]
        q.append(torch.cat([amplitude * angle.cos(), -amplitude * angle.sin()]))
    attention.q_proj.bias.copy_(torch.cat(q))
    if hasattr(attention, "q_norm"):
        # Normalised, the biases lose their size; the norm's weights give it back.
        size = AMPLITUDE * math.sqrt(float((amplitude > 0).sum()) / settings.head_dim)
        attention.q_norm.weight.fill_(size)
        attention.k_norm.weight.fill_(size)
