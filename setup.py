"""Builds the native backend: one abi3 module, no torch needed, one translation unit per instruction set."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = "src/closecall/backends/native"
X86 = platform.machine().lower() in ("x86_64", "amd64")
# With these, AddressSanitizer and UBSan watch the native code (`make sanitize`).
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]
# gcc 12 warns that its own AVX-512 headers use uninitialised variables.
QUIET = ["-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", *QUIET]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
TIERS = {
    "tier_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "tier_avx512.cpp": AVX512,
    "tier_avx512bf16.cpp": [*AVX512, "-mavx512bf16"],
    "tier_amx.cpp": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
# Tiers for Linux alone, which a compiler may be too old for, and the macro that says they are there.
NEWER = {"tier_amx.cpp": "CLOSECALL_AMX"}
# Stripped (`-s`): symbols that nobody outside can use would be a third of the wheel.
LINK = [] if sys.platform == "win32" else ["-pthread", *([] if os.environ.get("CLOSECALL_SANITIZE") else ["-s"])]
# Those that take longest come first, so that none is left to run alone.
SOURCES = [*(TIERS if X86 else ()), "tier_portable.cpp", "drivers.cpp", "module.cpp", "pool.cpp"]


class BuildPerTier(build_ext):
    """Compiles each tier with its own instruction set; everything else stays at the baseline. All at once:
    one after the other took 45 seconds."""

    def build_extension(self, ext: Extension) -> None:
        if os.environ.get("CLOSECALL_SANITIZE"):
            ext.extra_compile_args += SANITIZE
            ext.extra_link_args += SANITIZE[:1]

        sources, macros = list(ext.sources), list(ext.define_macros)
        for source in filter(lambda s: os.path.basename(s) in NEWER, ext.sources):
            if sys.platform == "linux" and self.accepts(TIERS[os.path.basename(source)]):
                macros.append((NEWER[os.path.basename(source)], "1"))
            else:
                sources.remove(source)

        def compiled(source: str) -> list[str]:
            objects: list[str] = self.compiler.compile(
                [source], output_dir=self.build_temp, include_dirs=ext.include_dirs, macros=macros,
                extra_postargs=[*ext.extra_compile_args, *TIERS.get(os.path.basename(source), ())], depends=ext.depends,
            )  # fmt: skip
            return objects

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process of its own
            ext.extra_objects += [made for objects in pool.map(compiled, sources) for made in objects]
        ext.language = "c++"  # without a source to tell it by, the linker would be C's
        ext.sources = []
        super().build_extension(ext)

    def accepts(self, flags: list[str]) -> bool:
        """Whether the compiler knows the flags."""
        with tempfile.TemporaryDirectory() as place:
            empty = os.path.join(place, "empty.cpp")
            with open(empty, "w"):
                pass
            try:
                self.compiler.compile([empty], output_dir=place, extra_postargs=flags)
            except CompileError:
                return False
        return True


class Abi3Wheel(bdist_wheel):
    """One wheel for every Python from 3.10 on."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


setup(
    ext_modules=[
        Extension(
            "closecall.backends._native",
            [f"{NATIVE}/{s}" for s in SOURCES],
            depends=[f"{NATIVE}/{s}" for s in sorted(os.listdir(NATIVE)) if s.endswith(".h")],
            define_macros=[("Py_LIMITED_API", "0x030A0000"), *([("CLOSECALL_X86", "1")] if X86 else [])],
            extra_compile_args=COMMON,
            extra_link_args=LINK,
            py_limited_api=True,
            # Without a compiler the package still installs; `closecall info` then says that slower backends are left.
            optional=not os.environ.get("CLOSECALL_REQUIRE_NATIVE"),
        )
    ],
    cmdclass={"build_ext": BuildPerTier, "bdist_wheel": Abi3Wheel},
)
