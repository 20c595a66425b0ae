"""Policies that we tuned to models, one JSON file each."""

from __future__ import annotations

from pathlib import Path


def tuned_path(model: str) -> Path:
    """The file of the policy that we tuned to a model."""
    there = {path.stem: path for path in Path(__file__).parent.glob("*.json")}
    if model not in there:
        known = ", ".join(sorted(there))
        raise ValueError(
            f"no policy was tuned to {model!r}: there are {known}; `closecall tune --model {model}` makes one"
        )
    return there[model]
