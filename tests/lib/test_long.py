"""A million tokens in memory that grows with n: no tensor of tiles x blocks, which would be 1 GiB there. Of other calls
half a million, where it would be 256 MiB. And chunks of the usual sizes, which choose what one piece chooses."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

import closecall
from engines import FUZZ, has_native

# Beyond q, k, v and the output, for one head: kept blocks, their ranks and scores (12 bytes x width / tile a row, here
# 6 MiB), summaries, and scratch of some hundred bytes a block.
MOST_MIB = 64
HALF_A_MILLION = 2**19 if not FUZZ else 2**20
PROMPT = """
    import re, resource, sys
    from pathlib import Path
    import torch, closecall

    n, dim = {tokens}, 8
    torch.set_num_threads(1)
    policy = closecall.policy({preset!r}, budget={budget}, pool={pool}, candidates={candidates})
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
# What is looked at beside the output: what was chosen, counted and recorded, and what two tiles can have lost.
WATCHED = """
    import json, tempfile
    from closecall.hf.stats import LayerStats, Recorder
    kept, stats, directory = closecall.select(q, k, policy), LayerStats(), tempfile.mkdtemp()
    stats.add(kept)
    Recorder(directory, scores=True, max_bytes=2**26).write(0, kept, lambda: 1 / 0)  # too large, so not made
    (line,) = map(json.loads, (Path(directory) / "index.jsonl").read_text().splitlines())
    assert "record without scores=True" in line["no_scores"], line
    assert stats.tiles == n // 64 and 0 < stats.kept <= 16 * stats.tiles + 16, (stats.tiles, stats.kept)
    cert = closecall.certify(q, k, v, kept, tiles=2)
    assert int(cert.real.sum()) == 2 * 64 and 0 < cert.max_mass <= 1
    out = cert.error[..., None]
"""
# The certificate's, in float64: summaries of every block, two numbers a key, and some arrays of 1 MiB.
CERTIFIED_MIB = 128


def prompt(tokens: int, call: str, mib: int = MOST_MIB, **policy: object) -> str:
    policy = {"candidates": 0} | policy
    return textwrap.dedent(PROMPT).format(tokens=tokens, mib=mib, call=textwrap.dedent(call).strip(), **policy)


PROMPTS = {
    "router-on-quest": (
        HALF_A_MILLION,
        ONE_PIECE,
        {"preset": "router-on-quest", "budget": 8, "pool": 16, "candidates": 4},
    ),
    "auto": (2**20, ONE_PIECE, {"preset": "auto", "budget": 8, "pool": 64}),
    "auto in chunks": (HALF_A_MILLION, CHUNKS, {"preset": "auto", "budget": 8, "pool": 64, "candidates": 2}),
}
SCRIPTS = {name: prompt(tokens, call, **policy) for name, (tokens, call, policy) in PROMPTS.items()} | {
    "watched": prompt(HALF_A_MILLION, WATCHED, mib=CERTIFIED_MIB, preset="auto", budget=8, pool=64),
    "every block": prompt(
        2**18, "out = closecall.select(q, k, 'dense').kv_idx", preset="quest", budget=8, pool=8, mib=32
    ),
}
# One process imports everything once, and each script runs in a fork of it, which limits its own memory.
FORKS = """
import json, os, sys, traceback
import torch, closecall

for name, script in json.load(sys.stdin).items():
    child = os.fork()  # torch has computed nothing here yet
    if not child:
        code = 1
        try:
            for number, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{sys.argv[1]}/{name}.{kind}", os.O_WRONLY | os.O_CREAT), number)
            exec(script, {})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """What a script printed, or told of its errors."""
    directory = tmp_path_factory.mktemp("long")
    scripts = json.dumps(SCRIPTS)
    subprocess.run([sys.executable, "-c", FORKS, str(directory)], input=scripts, text=True, check=True)
    return lambda name, kind: (directory / f"{name}.{kind}").read_text().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not has_native(), reason="the reference is made to be read, not to be large")
@pytest.mark.parametrize("name", PROMPTS)
def test_a_million_tokens(name: str, said: Callable[[str, str], str]) -> None:
    assert said(name, "out") == f"done (1, 1, {PROMPTS[name][0]}, 8) True", said(name, "err")[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not has_native(), reason="the reference is made to be read, not to be large")
def test_many_tokens_counted_recorded_and_certified(said: Callable[[str, str], str]) -> None:
    assert said("watched", "out") == f"done (1, 1, {HALF_A_MILLION}, 1) True", said("watched", "err")[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_would_be_noticed(said: Callable[[str, str], str]) -> None:
    """A selection of every block is a tensor of tiles x blocks, and does not fit."""
    assert said("every block", "out") == ""
    last = said("every block", "err").splitlines()[-1]
    assert last.startswith("MemoryError: memory does not suffice to choose blocks for 1 heads of 4096 tiles"), last
    assert f"up to 4096 blocks a tile take {12 * 4096 * 4096:,} bytes. Use a policy that caps what a tile keeps" in last


@pytest.mark.skipif(not has_native(), reason="the reference is made to be read, not to be large")
@pytest.mark.parametrize("chunk", [2048, 16384])
def test_chunks_choose_what_one_piece_chooses(chunk: int) -> None:
    """Where the rule decides tile by tile. Summaries are kept from chunk to chunk."""
    generator = torch.Generator().manual_seed(1)
    n, policy = 32768, closecall.policy("quest", budget=8, pool=8)
    q, k = (torch.randn(1, heads, n, 16, generator=generator).bfloat16() for heads in (2, 1))
    whole, kept = closecall.select(q, k, policy), closecall.Summaries()
    for start in range(0, n, chunk):
        part = closecall.select(q[:, :, start : start + chunk], k[:, :, : start + chunk], policy, summaries=kept)
        tiles = slice(start // 64, (start + chunk) // 64)
        assert torch.equal(part.counts, whole.counts[:, :, tiles])
        here = torch.arange(part.kv_idx.shape[3]) < part.counts[..., None]
        assert torch.equal(part.kv_idx[here], whole.kv_idx[:, :, tiles][..., : here.shape[3]][here])
        assert kept.reused == start // 64
