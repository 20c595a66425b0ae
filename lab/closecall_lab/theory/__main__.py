"""How close certificates come to the truth on made-up tensors: `python -m closecall_lab.theory tightness`."""

from __future__ import annotations

import argparse
import time

import torch

from closecall.api import attend, select
from closecall.certify.certificate import certify
from closecall.policy import Policy, policy

from .tightness import tightness


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
    parser.add_argument("what", choices=["tightness"], help="how close certificates come to the truth")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    print(tightness_table(args.context, args.seed))


if __name__ == "__main__":
    main()
