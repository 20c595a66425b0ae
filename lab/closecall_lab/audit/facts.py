"""What a kernel variant compiled to, and whether that is what we aim for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from . import devices

# Instructions that one turn of a main loop may take in bfloat16 at head dim 128: what it came to, and a little room for
# another compiler.
MOST_INSTRUCTIONS = {
    ("sm_80", "attend"): 640,
    ("sm_90", "attend"): 430,
    ("sm_90", "attend tma"): 360,
    ("sm_80", "scores mean"): 490,
    ("sm_90", "scores mean"): 290,
    ("sm_80", "scores mean pooled"): 500,
    ("sm_90", "scores mean pooled"): 310,
    ("sm_80", "scores quest"): 430,
    ("sm_90", "scores quest"): 240,
    ("sm_80", "scores quest pooled"): 460,
    ("sm_90", "scores quest pooled"): 260,
    ("sm_80", "scores quest softmax"): 460,
    ("sm_90", "scores quest softmax"): 265,
    ("sm_80", "scores quest mass"): 560,
    ("sm_90", "scores quest mass"): 350,
    ("sm_80", "scores outliers-1"): 460,
    ("sm_90", "scores outliers-1"): 265,
    ("sm_80", "scores boxed-outliers-1 softmax"): 650,
    ("sm_90", "scores boxed-outliers-1 softmax"): 350,
    ("sm_80", "sums quest"): 640,
    ("sm_90", "sums quest"): 460,
    ("sm_80", "sums quest softmax"): 670,
    ("sm_90", "sums quest softmax"): 490,
    ("sm_80", "sums boxed-outliers-1 softmax"): 870,
    ("sm_90", "sums boxed-outliers-1 softmax"): 580,
    ("sm_80", "again mean"): 500,
    ("sm_90", "again mean"): 310,
    ("sm_80", "again quest"): 445,
    ("sm_90", "again quest"): 260,
}
MOST_BARRIERS = {("sm_90", "attend tma"): 3}  # of a turn of these; 2 if not said


@dataclass(frozen=True)
class Facts:
    """What a variant compiled to. Bytes, and registers per thread, unless a name says otherwise.

    `tensor` to `instructions` are of one turn of the main loop (see `assembly.Loop`), `buffers` and `warps` of what
    the compiler planned before it emitted code (see `assembly.buffers` and `warps`). A turn takes `rows` queries and
    `keys` keys of a key block of `block`; all None if the kernel has no such step. AMD has no stack of its own name:
    `stack` is its private segment. `scalar_spills` counts its scalar registers that are parked in lanes of vector
    registers: they cost instructions, but no memory. `must_pipeline` is what the variant promises.
    """

    name: str
    arch: str
    head_dim: int
    dtype: str
    num_warps: int
    num_stages: int
    must_pipeline: bool
    rows: int | None
    keys: int | None
    block: int | None
    registers: int
    scalar_registers: int | None
    stack: int
    spills: int
    scalar_spills: int | None
    shared: int
    tensor_columns: int
    loop: bool
    tensor: int
    tensor_kind: str | None
    copies: int
    loads: int
    wide_loads: int
    loads_ahead: int
    waits: tuple[int, ...]
    buffers: int
    barriers: int
    shared_stores: int
    instructions: int
    warps: str | None
    resident_blocks: int
    resident_warps: int
    limit: str

    @property
    def overlapped(self) -> bool | None:
        """Whether copies of later turns are on their way while the main loop works on this one; None without a loop.

        NVIDIA: there are copies inside the loop, they go through at least two buffers, and no wait is for all of them:
        the copies that a turn begins are then not those that it waits for (bulk copies: nor those of the next turn).
        AMD: more than half of the wide loads are still in flight when tensor cores work. How much of the latency that
        hides, no assembly shows.
        """
        if not self.loop:
            return None
        if devices.target(self.arch).backend == "cuda":
            return self.copies > 0 and self.buffers >= 2 and bool(self.waits) and min(self.waits) > 0
        return 2 * self.loads_ahead > self.wide_loads

    @property
    def row_in_warp(self) -> bool | None:
        """Whether all products keep a row inside a warp; None where products are not laid out over warps."""
        if self.warps is None:
            return None
        return all(layout.endswith("x 1") for layout in self.warps.split(", "))

    @property
    def tensor_per_block(self) -> int | None:
        """Tensor-core instructions for a whole key block, of kernels that go through key blocks."""
        if not self.must_pipeline or not self.keys or not self.block:
            return None
        return self.tensor * -(-self.block // self.keys)

    def problems(self) -> list[str]:
        """What breaks the aims every variant has to meet; empty if nothing does."""
        target = devices.target(self.arch)
        found = []
        if self.stack:
            found.append(f"{self.stack} bytes of stack")
        if self.spills:
            found.append(f"{self.spills} spills")
        if self.shared > target.shared_per_block:
            found.append(f"{self.shared} bytes of shared memory, {target.shared_per_block} is the limit")
        elif self.resident_blocks == 0:
            found.append(f"not one thread block fits ({self.limit})")
        if self.must_pipeline and not self.overlapped:
            found.append(f"copies wait in the main loop ({self.overlap})")
        # AMD lays the two products out apart, the first with rows inside a warp; weights go through shared memory.
        if self.must_pipeline and target.backend == "cuda" and self.dtype != "fp32" and self.row_in_warp is False:
            found.append(f"the softmax crosses warps ({self.warps})")
        turn = (self.arch, self.name.split(" D")[0])
        if turn in MOST_INSTRUCTIONS and (self.head_dim, self.dtype) == (128, "bf16"):
            if not self.must_pipeline and not self.overlapped:
                found.append(f"copies wait in the main loop ({self.overlap})")
            for count, most, what in (
                (self.instructions, MOST_INSTRUCTIONS[turn], "instructions"),
                (self.barriers, MOST_BARRIERS.get(turn, 2), "barriers"),
            ):
                if count > most:
                    found.append(f"{count} {what} a turn, {most} is the aim")
        return found

    @property
    def overlap(self) -> str | None:
        """`overlapped` in words."""
        if not self.loop:
            return None
        if devices.target(self.arch).backend != "cuda":
            return f"{self.loads_ahead} of {self.wide_loads} wide loads ahead, buffers {self.buffers}"
        if not self.copies:
            return "no copies"
        return f"{self.copies} copies, wait {'/'.join(map(str, self.waits)) or 'none'}, buffers {self.buffers}"

    def to_dict(self) -> dict[str, Any]:
        derived = ("overlapped", "overlap", "row_in_warp", "tensor_per_block")
        return dataclasses.asdict(self) | {x: getattr(self, x) for x in derived} | {"problems": self.problems()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Facts:
        return cls(**{f.name: data[f.name] for f in dataclasses.fields(cls)} | {"waits": tuple(data["waits"])})
