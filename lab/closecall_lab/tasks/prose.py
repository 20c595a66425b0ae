"""A piece of prose to hide needles in, written for this purpose. It has no digits: no number is there by chance."""

from pathlib import Path

TEXT = Path(__file__).with_name("prose.txt").read_text(encoding="utf-8")
