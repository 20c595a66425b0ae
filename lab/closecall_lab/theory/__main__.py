"""Numbers for the documentation: `python -m closecall_lab.theory speed`, and `tightness` in place of `speed`."""

from __future__ import annotations

import argparse
import time

import torch

from closecall.api import attend, select
from closecall.certify.certificate import certify
from closecall.policy import Policy, policy

from .gaps import Tiles
from .monte_carlo import Estimate, estimate, regret
from .tightness import tightness

_PART = 50_000  # tiles held at once


def speed(tiles: int, blocks: int, keep: int, expanded: int, samples: int, seed: int) -> str:
    """Time of a Monte Carlo over made-up tiles (normal scores, tau a tenth of their spread), part by part."""
    generator = torch.Generator().manual_seed(seed)
    parts, wall, cpu = [], 0.0, 0.0
    margins = []
    for first in range(0, tiles, _PART):
        n = min(_PART, tiles - first)
        scores = torch.randn(n, blocks, generator=generator).sort(1, descending=True).values
        started, used = time.perf_counter(), time.process_time()
        parts.append(estimate(Tiles.of(scores, keep, expanded), 0.1, samples=samples, seed=seed + first))
        wall, cpu = wall + time.perf_counter() - started, cpu + time.process_time() - used
        cut = scores[:, keep]
        margins.append((scores[:, keep - 1] - cut) / (scores[:, 0] - cut))
    found, margin = Estimate.cat(parts), torch.cat(margins)
    started, used = time.perf_counter(), time.process_time()
    fired = torch.zeros(tiles, dtype=torch.bool)
    fired[margin.argsort()[: int(0.4 * tiles)]] = True
    lost = regret(found, fired)
    wall, cpu = wall + time.perf_counter() - started, cpu + time.process_time() - used
    return (
        f"{tiles} tiles of {blocks} blocks, keep {keep}, expanded {expanded}, {samples} draws each: {cpu:.0f} s of "
        f"processor time, {wall:.0f} s on the clock\nmean V* {float(found.value.mean()):.4f}; regret of the margin "
        f"between {lost.low:.4f} (error {lost.error:.1e}) and {lost.high:.4f}"
    )


def inputs(kind: str, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4 query heads on 2 key heads, 64 dimensions. `noise`: unrelated normals. `drifting`: keys and queries wander
    slowly and share a direction, as positions in a text do. `sink`: drifting, and every row likes the first key."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, n, 64, generator=generator) for h in (4, 2, 2))
    if kind == "noise":
        return q, k, v
    path = torch.randn(1, 1, n, 64, generator=generator).cumsum(2) / 16  # about one unit a block
    path = path / path.norm(dim=-1, keepdim=True) * 8
    q, k = path + q / 2, path + k / 4
    if kind == "sink":
        direction = torch.randn(64, generator=generator) / 8
        q = q + 6 * direction
        k[:, :, 0] = 24 * direction
    return q, k, v


def tightness_table(n: int, seed: int) -> str:
    lines = ["| input | tile budget | true mass | bound | true error | bound | rows certified at 0.1 | could be |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for kind in ("noise", "drifting", "sink"):
        q, k, v = inputs(kind, n, seed)
        for budget in (4, 8, 12):
            chosen: Policy = policy("quest", budget=budget)
            found = tightness(q, k, v, select(q, k, chosen))
            lines.append(
                f"| {kind} | {2 * budget} | {found.mass:.3g} | {found.mass_bound:.3g} | {found.error:.3g} | "
                f"{found.error_bound:.3g} | {found.certified:.0%} | {found.certifiable:.0%} |"
            )
    started = time.perf_counter()
    selection = select(q, k, chosen)
    certify(q, k, v, selection)
    took, started = time.perf_counter() - started, time.perf_counter()
    attend(q, k, v, select(q, k, "dense"))
    lines.append(f"\ncertify: {took:.2f} s; dense attention of the same tensors: {time.perf_counter() - started:.2f} s")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m closecall_lab.theory", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fast = commands.add_parser("speed", help="time a Monte Carlo over made-up tiles")
    defaults = {"tiles": 5_000_000, "blocks": 160, "keep": 63, "expanded": 129, "samples": 16, "seed": 0}
    for name, value in defaults.items():
        fast.add_argument(f"--{name}", type=int, default=value)
    tight = commands.add_parser("tightness", help="how close certificates come to the truth on made-up tensors")
    tight.add_argument("--context", type=int, default=2048)
    tight.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    if given.pop("command") == "speed":
        print(speed(**given))
    else:
        print(tightness_table(given["context"], given["seed"]))


if __name__ == "__main__":
    main()
