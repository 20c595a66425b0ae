"""The map of the house, measured: `python -m research.house` prints what docs/architecture.md shows.

Lines and files of every room, who imports whom (as Mermaid, for the map), cycles between rooms, the size of the
library's wheel and the time of `import closecall`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

HOME = Path(__file__).resolve().parents[1]
PACKAGES = {"closecall": HOME / "src", "closecall_lab": HOME / "lab", "research": HOME}
# The doors: they show names of every room and would tie any house together.
DOORS = {"closecall", "closecall.cli", "closecall_lab", "closecall_lab.cli"}
IMPORTS = 7  # fresh processes, of which the median is taken

Graph = dict[str, set[str]]


def room_of(module: str) -> str:
    """The room of a module: the package's first level, `closecall.rules` for `closecall.rules.topk`."""
    return ".".join(module.split(".")[:2])


def rooms() -> dict[str, list[Path]]:
    """Every room with its Python files, as git knows them."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=HOME, capture_output=True, text=True, check=True)
    files = [HOME / line for line in listed.stdout.splitlines()]
    by_room: dict[str, list[Path]] = defaultdict(list)
    for package, root in PACKAGES.items():
        for path in files:
            if path.is_relative_to(root / package):
                by_room[room_of(".".join(path.relative_to(root).with_suffix("").parts))].append(path)
    return dict(by_room)


def imports() -> Graph:
    """Which room imports which, doors left out."""
    graph = grimp.build_graph(*PACKAGES)
    edges: Graph = defaultdict(set)
    for module in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(module):
            if not {module, imported} & DOORS and room_of(module) != room_of(imported):
                edges[room_of(module)].add(room_of(imported))
    return dict(edges)


def cycle(edges: Graph) -> list[str]:
    """Rooms that import each other in a ring; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def mermaid(edges: Graph) -> Iterator[str]:
    """The graph without the edges that follow from others: what is left shows the floors."""
    yield "graph TD"
    for room, below in sorted(edges.items()):
        for target in sorted(below):
            if not any(target in reachable(edges, other) for other in below - {target}):
                yield f"    {room} --> {target}"


def reachable(edges: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        for target in edges.get(stack.pop(), set()) - seen:
            seen.add(target)
            stack.append(target)
    return seen


def wheel_bytes() -> int:
    """The size of the library's wheel, built from a clean clone as a user's pip would."""
    with tempfile.TemporaryDirectory() as place:
        clone, wheels = Path(place, "clone"), Path(place, "wheels")
        subprocess.run(["git", "clone", "-q", str(HOME), str(clone)], check=True)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "-w", str(wheels), str(clone)], check=True, stderr=subprocess.DEVNULL)
        return next(wheels.glob("*.whl")).stat().st_size


def import_seconds(statement: str) -> float:
    """The median time of a statement in fresh processes, the interpreter's own start taken off."""

    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return statistics.median(run(statement) - run("pass") for _ in range(IMPORTS))


def main() -> None:
    by_room, edges = rooms(), imports()
    print(f"{'room':32} {'files':>5} {'lines':>6}")
    totals: dict[str, int] = defaultdict(int)
    for room, files in sorted(by_room.items()):
        lines = sum(len(path.read_text().splitlines()) for path in files)
        totals[room.split(".")[0]] += lines
        print(f"{room:32} {len(files):5} {lines:6}")
    print(", ".join(f"{package} {lines}" for package, lines in totals.items()), f"total {sum(totals.values())}")
    ring = cycle(edges)
    print("rooms that import each other:", " -> ".join(ring) if ring else "none")
    print("\n".join(mermaid(edges)))
    for statement in ("import closecall", "import closecall; closecall.attention", "import torch"):
        print(f"{statement}: {import_seconds(statement):.2f} s")
    print(f"wheel of the library {wheel_bytes() / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
