"""A million tokens in memory that grows with n: no tensor of tiles x blocks, which would be 1 GiB there."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from engines import has_native

# Beyond q, k, v and the output, for one head: kept blocks, their ranks and scores (12 bytes x width / tile a row, here
# 6 MiB), summaries, and scratch of some hundred bytes a block.
MOST_MIB = 64
PROMPT = """
    import re, resource, sys
    from pathlib import Path
    import torch, closecall

    n, dim = {tokens}, 8
    torch.set_num_threads(1)
    policy = closecall.policy({preset!r}, budget={budget}, pool={pool})
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, dim, generator=generator).bfloat16() for _ in range(3))
    closecall.attention(q[:, :, :9000], k[:, :, :9000], v[:, :, :9000], policy)  # all that is made once is made
    size = int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
    most = size + q.nbytes + {mib} * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    {call}
    print("done", tuple(out.shape), bool(out.isfinite().all()))
"""
ONE_PIECE = "out = closecall.attention(q, k, v, policy)"
CHUNKS = """
    out, kept, chunk = torch.empty_like(q), closecall.Summaries(), 16384
    for at in range(0, n, chunk):
        seen = slice(0, at + chunk)
        out[:, :, at : at + chunk] = closecall.attention(
            q[:, :, at : at + chunk], k[:, :, seen], v[:, :, seen], policy, summaries=kept
        )
"""


def run(tokens: int, call: str, mib: int = MOST_MIB, **policy: object) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(PROMPT).format(tokens=tokens, mib=mib, call=textwrap.dedent(call).strip(), **policy)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not has_native(), reason="the reference is made to be read, not to be large")
@pytest.mark.parametrize(
    ("call", "policy"),
    [
        (ONE_PIECE, {"preset": "router-on-quest", "budget": 8, "pool": 16}),
        (ONE_PIECE, {"preset": "auto", "budget": 8, "pool": 64}),
        (CHUNKS, {"preset": "auto", "budget": 8, "pool": 64}),
    ],
    ids=["router-on-quest", "auto", "auto in chunks"],
)
def test_a_million_tokens(call: str, policy: dict[str, object]) -> None:
    found = run(2**20, call, **policy)
    assert found.stdout.strip() == f"done (1, 1, {2**20}, 8) True", found.stderr[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_would_be_noticed() -> None:
    """A selection of every block is a tensor of tiles x blocks, and does not fit."""
    found = run(2**18, "out = closecall.select(q, k, 'dense').kv_idx", preset="quest", budget=8, pool=8, mib=32)
    assert found.returncode != 0
    assert "alloc" in found.stderr or "memory" in found.stderr.lower()
