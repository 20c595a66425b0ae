"""What a GPU target allows a kernel: registers, shared memory and residency, from published documents."""

from __future__ import annotations

from dataclasses import dataclass

from closecall.registry import unknown

KIB = 1024

CUDA_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
CUDA_OCCUPANCY = "CUDA's cuda_occupancy.h: allocation units"
CDNA3 = "AMD CDNA3 instruction set reference; LLVM's AMDGPU back end: allocation units, waves by scalar registers"


@dataclass(frozen=True)
class Residency:
    """How many thread blocks of a kernel fit on one multiprocessor at a time, and what stops the next one."""

    blocks: int
    warps: int
    limit: str


@dataclass(frozen=True)
class Target:
    """A compile target: what one of its multiprocessors (AMD: compute units) has to give.

    `registers` counts 32-bit registers of all lanes. A warp takes whole `register_unit`s of them on one of
    `schedulers` register files; a thread block takes whole `shared_unit`s of shared memory, and `shared_reserved` more.
    """

    arch: str
    backend: str
    number: int | str
    warp_size: int
    max_warps: int
    max_blocks: int
    schedulers: int
    registers: int
    register_unit: int
    max_registers: int
    shared: int
    shared_per_block: int
    shared_reserved: int
    shared_unit: int
    tensor_columns: int
    sources: tuple[str, ...]

    def resident(
        self, *, warps: int, registers: int, shared: int, tensor_columns: int = 0, scalar_registers: int = 0
    ) -> Residency:
        """What fits of a kernel of `warps` warps a block, `registers` a thread, and `shared` bytes a block."""
        for name, value, least in (("warps", warps, 1), ("registers", registers, 0), ("shared", shared, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        limits = {"blocks": self.max_blocks, "warps": self.max_warps // warps}
        if registers:
            per_warp = -(-registers * self.warp_size // self.register_unit) * self.register_unit
            per_file = self.registers // self.schedulers // per_warp
            limits["registers"] = per_file * self.schedulers // warps
        if shared:
            per_block = -(-shared // self.shared_unit) * self.shared_unit + self.shared_reserved
            limits["shared memory"] = self.shared // per_block if shared <= self.shared_per_block else 0
        if tensor_columns:
            limits["tensor memory"] = self.tensor_columns // tensor_columns
        if scalar_registers and self.backend == "hip":
            waves = 8 if scalar_registers <= 100 else 7  # per scheduler, by LLVM's table for this family
            limits["scalar registers"] = waves * self.schedulers // warps
        blocks = min(limits.values())
        return Residency(blocks, blocks * warps, min(limits, key=lambda name: limits[name]))


def _nvidia(number: int, shared_kib: int, tensor_columns: int = 0, max_warps: int = 64, max_blocks: int = 32) -> Target:
    return Target(
        arch=f"sm_{number}",
        backend="cuda",
        number=number,
        warp_size=32,
        max_warps=max_warps,
        max_blocks=max_blocks,
        schedulers=4,
        registers=65_536,
        register_unit=256,
        max_registers=255,
        shared=shared_kib * KIB,
        shared_per_block=(shared_kib - 1) * KIB,
        shared_reserved=KIB,
        shared_unit=128,
        tensor_columns=tensor_columns,
        sources=(CUDA_GUIDE, CUDA_OCCUPANCY),
    )


TARGETS: dict[str, Target] = {
    "sm_80": _nvidia(80, 164),
    "sm_86": _nvidia(86, 100, max_warps=48, max_blocks=16),
    "sm_89": _nvidia(89, 100, max_warps=48, max_blocks=24),
    "sm_90": _nvidia(90, 228),
    "sm_100": _nvidia(100, 228, tensor_columns=512),
    "sm_120": _nvidia(120, 100, max_warps=48, max_blocks=24),
    "gfx942": Target(
        arch="gfx942",
        backend="hip",
        number="gfx942",
        warp_size=64,
        max_warps=32,
        max_blocks=32,
        schedulers=4,
        registers=131_072,  # 4 x 512 of 64 lanes, vector and accumulation registers together
        register_unit=8 * 64,
        max_registers=512,
        shared=64 * KIB,
        shared_per_block=64 * KIB,
        shared_reserved=0,
        shared_unit=512,
        tensor_columns=0,
        sources=(CDNA3,),
    ),
}


def target(arch: str) -> Target:
    if arch not in TARGETS:
        raise unknown("architecture", arch, TARGETS)
    return TARGETS[arch]
