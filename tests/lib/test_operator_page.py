"""The code of docs/operator.md runs, as one program from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import closecall
from closecall.presets import PRESETS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operator.md"


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(pieces) >= 6
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for piece in pieces:
        shorter = piece.replace("4096", "2048").replace("4097", "2049").replace("4000", "2000").replace("4095", "2047")
        exec(compile(shorter, str(PAGE), "exec"), space)
    assert "share-on-quest" in str(closecall.policy("share-on-quest"))


def test_every_preset_is_in_its_table() -> None:
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in PRESETS)
