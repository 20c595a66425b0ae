"""Probes: small language models, trained here, that find entries in up to 32K tokens and follow pointers between them.

model, tokenizer = closecall_lab.probes.load("qwen2")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from closecall.registry import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WEIGHTS = Path(__file__).parent / "weights"
# In a directory of its own: beside a config of type qwen2, transformers makes a byte-level tokenizer of any other.
TOKENIZER = "tokenizer"


def names() -> tuple[str, ...]:
    """The probes that ship."""
    return tuple(sorted({path.parent.name for path in WEIGHTS.glob("*/seed*")}))


def seeds(name: str) -> tuple[int, ...]:
    """The seeds of a probe that ship; 0 is the one to use, the others tell how much hangs on the seed."""
    if name not in names():
        raise unknown("probe", name, names())
    return tuple(sorted(int(path.name.removeprefix("seed")) for path in (WEIGHTS / name).glob("seed*")))


def directory(name: str, seed: int = 0) -> Path:
    """Returns the directory of a probe, for `from_pretrained`; the tokenizer lies in it too."""
    if seed not in seeds(name):
        raise ValueError(f"probe {name!r} does not ship with seed {seed}: known: {', '.join(map(str, seeds(name)))}")
    return WEIGHTS / name / f"seed{seed}"


def load(name: str | Path, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A probe in float32, ready to answer, and its tokenizer. A path loads a training's result."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = name if isinstance(name, Path) else directory(name, seed)
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(where / TOKENIZER)
    return model.eval(), tokenizer
