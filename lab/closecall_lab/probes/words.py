"""The probes' vocabulary, about a thousand words, and their word-level tokenizer.

Four kinds of words: marks with a role in the format, keys (what an entry is filed under, and what a pointer points to),
values (what a chain ends in), and filler words by part of speech. No word is of two kinds, and each kind is one range
of ids, so an id tells its kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..spine.files import word_lists

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START = "<pad>", "<unk>", "<start>"
END, ARROW, ASK = ".", "->", "ask"
MARKS = (PAD, UNKNOWN, START, END, ARROW, ASK)


WORDS = word_lists(Path(__file__).with_name("vocabulary.txt"))
KEYS, VALUES = WORDS["key"], WORDS["value"]
FILLER = {kind: words for kind, words in WORDS.items() if kind not in ("key", "value")}  # by part of speech

# Spans of ids by kind: (first, end).
SPANS: dict[str, tuple[int, int]] = {}


def _vocabulary() -> tuple[str, ...]:
    vocabulary: list[str] = []
    seen: dict[str, str] = {}
    for kind, group in {"mark": MARKS, **WORDS}.items():
        for word in group:
            if word in seen:
                raise ValueError(f"the word {word!r} is listed twice in the probes' vocabulary: {seen[word]}, {kind}")
            seen[word] = kind
        SPANS[kind] = (len(vocabulary), len(vocabulary) + len(group))
        vocabulary += group
    return tuple(vocabulary)


VOCABULARY = _vocabulary()
IDS = {word: number for number, word in enumerate(VOCABULARY)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words are split at white space; `<start>` is put in front, as the probes were trained with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, IDS[START])])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
