"""Policies that we tuned to models, one JSON file each."""

from __future__ import annotations

import json
from pathlib import Path


def shipped() -> dict[str, Path]:
    """Their files, by the model's name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.json"))}


def tuned_at(model: str) -> int:
    """The length of prompt, in tokens, that its policy was tuned at."""
    return int(json.loads(tuned_path(model).read_text(encoding="utf-8"))["measured"]["context"])


def tuned_path(model: str) -> Path:
    """The file of the policy that we tuned to a model."""
    there = shipped()
    if model not in there:
        known = ", ".join(there)
        raise ValueError(
            f"no policy was tuned to {model!r}: there are {known}; `closecall tune --model {model}` makes one"
        )
    return there[model]
