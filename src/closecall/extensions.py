"""What other distributions add to the library: the lab, above all. The one place where the library looks up.

A distribution names what it adds among its entry points, in the group `closecall.extensions`; nothing here imports it
before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy

GROUP = "closecall.extensions"
INSTALL_LAB = "pip install ./lab, in a checkout of closecall"  # closecall-lab is on no package index yet


def extension(name: str, distribution: str) -> Any:
    """What goes by this name; the error says which distribution has it."""
    for found in entry_points(group=GROUP, name=name):
        return found.load()
    raise ImportError(f"closecall.{name} is part of {distribution}, which is not installed: {INSTALL_LAB}")


def explain(
    model: Any, inputs: Any, policy: Policy | str | Path | Sequence[Policy | str | Path], **options: Any
) -> Any:
    """Shows what a prompt's attention keeps, drops and nearly keeps under a policy, or under two side by side.

    `model` is a Hugging Face model, or what `closecall.load` returns, which has its tokenizer with it. `inputs` is one
    prompt: a text, token ids, or what a tokenizer returns. The result has `save(path)`, which writes one page that
    needs no other file. Notebooks show it; `print` gives the sentences at its top.

    Options: `tokenizer` (for texts, with a bare model), `question` and `answer` (texts in the prompt: what is asked,
    and the expected answer), `layers` (which to show), `truth=False` (leaves true masses out, which need dense
    attention), `new_tokens=32` (most tokens of the answer), `say` (called with a line of progress now and then).

    >>> closecall.explain(model, "A long text", "auto", tokenizer=tokenizer).save("page.html")  # doctest: +SKIP
    """
    return extension("explain", "closecall-lab")(model, inputs, policy, **options)
