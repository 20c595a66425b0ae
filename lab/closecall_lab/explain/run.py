"""Explains a prompt: from a model and what it is called with to a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from closecall.policy import Policy, as_policy

from .gather import gather
from .page import Explanation
from .prompt import Prompt, from_inputs

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Says nothing."""


def explain(
    model: Any,
    inputs: Any,
    policy: Policy | str | Path | Sequence[Policy | str | Path],
    *,
    tokenizer: Any = None,
    question: str = "",
    answer: str = "",
    layers: Sequence[int] | None = None,
    truth: bool = True,
    new_tokens: int = 32,
    say: Say = silent,
) -> Explanation:
    """What `closecall.explain` does; see there."""
    words = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    prompt = from_inputs(words, inputs, question=question, answer=answer)
    given = [policy] if isinstance(policy, (Policy, str, Path)) else list(policy)
    policies = [(one if isinstance(one, str) else one.name, as_policy(one)) for one in given]
    return explain_prompt(model, words, prompt, policies, layers=layers, truth=truth, new_tokens=new_tokens, say=say)


def explain_prompt(
    model: Any, tokenizer: Any, prompt: Prompt, policies: Sequence[tuple[str, Policy]], *,
    layers: Sequence[int] | None, truth: bool, new_tokens: int, say: Say,
) -> Explanation:  # fmt: skip
    """One prompt under one or two policies, each with the name it goes by on the page."""
    bare = getattr(model, "model", model) if hasattr(model, "tokenizer") else model
    name = getattr(model, "own_name", None) or type(bare).__name__
    writes = new_tokens if tokenizer is not None else 0
    _check_length(len(prompt.ids), writes, _context(model, bare), name)
    gathered = gather(
        bare, tokenizer, name, prompt, _told_apart(policies), layers=layers, truth=truth, new_tokens=writes, say=say
    )
    return Explanation(gathered)


def _told_apart(policies: Sequence[tuple[str, Policy]]) -> list[tuple[str, Policy]]:
    """Two of one name are numbered."""
    seen: Counter[str] = Counter()
    numbered = []
    for name, policy in policies:
        seen[name] += 1
        numbered.append((f"{name} ({seen[name]})" if seen[name] > 1 else name, policy))
    return numbered


def _context(model: Any, bare: Any) -> int | None:
    """How many tokens the model reads, as far as it says."""
    if hasattr(model, "context"):
        found: int | None = model.context
        return found
    return getattr(bare.config.get_text_config(), "max_position_embeddings", None)


def _check_length(tokens: int, writes: int, most: int | None, name: str) -> None:
    if most is not None and tokens + writes > most:
        raise ValueError(
            f"the prompt has {tokens:,} tokens and {writes} are to be written, but {name} reads {most:,}: shorten the "
            "prompt or ask for fewer tokens"
        )
