"""What `import closecall` must not bring with it. Who may import whom is import-linter's business (`make lint`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

import closecall

HEAVY = ("transformers", "triton", "ray", "vllm", "matplotlib", "torch._dynamo", "closecall_lab")


@pytest.mark.parametrize("module", ["closecall", "closecall.cli"])
def test_importing_brings_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {('torch', *HEAVY)} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_a_call_brings_nothing_heavy_either() -> None:
    code = (
        "import sys, torch, closecall; x = torch.randn(1, 1, 300, 16); "
        "closecall.attention(x, x, x, 'auto:budget=2'); closecall.attend(x, x, x, closecall.select(x, x, 'quest')); "
        f"print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_every_public_name_is_there() -> None:
    for name in closecall.__all__:
        assert getattr(closecall, name) is not None
    assert {"Ranked", "Decision", "Rule", "Scorer", "Trigger", "Policy"} <= set(closecall.__all__)


def test_modules_of_the_same_name_do_not_hide_a_public_function() -> None:
    code = (
        "import closecall, closecall.policy, closecall.certify.certificate, closecall.api; from closecall import *; "
        "print(closecall.policy('quest').name, closecall.certify is certify, attend is closecall.api.attend)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["quest", "True", "True"]
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        closecall.atend  # noqa: B018
