"""Tokenizers to make prompts for: a small byte-level one, the same with a chat template, and SmolLM2's where it is."""

from __future__ import annotations

from typing import Any

import pytest

from closecall.models.known.smollm2 import SOURCE
from closecall_lab.tasks.prose import TEXT

pytest.importorskip("transformers")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _small(**options: Any) -> Any:
    """Byte-level BPE learned from the prose, as GPT-2's is; a begin token in front, as Llama's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    raw.train_from_iterator(
        [TEXT] * 2,
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=marks, show_progress=False),
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return fast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>", **options)


@pytest.fixture(scope="session")
def plain() -> Any:
    return _small()


@pytest.fixture(scope="session")
def chat() -> Any:
    return _small(chat_template=TEMPLATE)


@pytest.fixture(scope="session", params=["plain", "chat", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param != "smollm2":
        return request.getfixturevalue(request.param)
    directory = SOURCE.converted_path
    if not (directory / "tokenizer.json").is_file():
        pytest.skip("smollm2 is not fetched: `closecall get smollm2`")
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def probe() -> Any:
    from closecall_lab.probes.words import tokenizer

    return tokenizer()
