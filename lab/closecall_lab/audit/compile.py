"""Compiles kernel variants for GPUs that are not here, and reads from the binaries what they will need there.

Compilers run in a process of their own: one that crashes takes no one with it, several can run side by side, and a
process that has Triton's interpreter switched on (which compiles nothing) can still ask.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from closecall.cache import cache_dir
from closecall.registry import unknown

from . import assembly, devices
from .facts import Facts

VARIANTS = "closecall.backends.triton.variants"
MODULE = "closecall_lab.audit.compile"


class CompileError(ValueError):
    """A variant that does not compile: says which, for what, and what the compiler said."""


class Variant(Protocol):
    """A kernel with everything fixed that the compiler must know."""

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> Any: ...
    @property
    def signature(self) -> dict[str, str]: ...
    @property
    def constexprs(self) -> dict[str, Any]: ...
    @property
    def attrs(self) -> Any: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def pipelined(self) -> bool: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def arch(self) -> str: ...


def _nvidia(compiled: Any) -> dict[str, int | None]:
    knobs: Any = importlib.import_module("triton.knobs")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    # Several functions: the kernel's own need is the largest, since what it calls runs in its registers.
    need = {key: max(map(int, re.findall(rf"\b{key}:(\d+)", text))) for key in ("REG", "STACK", "LOCAL")}
    return {
        "registers": need["REG"],
        "scalar_registers": None,
        "stack": need["STACK"],
        "spills": need["LOCAL"],  # a spill is kept on the stack, or in local memory
        "scalar_spills": None,
    }


def _amd(compiled: Any) -> dict[str, int | None]:
    text = compiled.asm["amdgcn"]

    def read(key: str) -> int:
        found = re.search(rf"^\s*-?\s*\.{key}:\s+(\d+)", text, re.MULTILINE)
        if found is None:
            raise CompileError(f"the code object's metadata has no .{key}")
        return int(found[1])

    return {
        "registers": read("vgpr_count"),  # accumulation registers are part of it
        "scalar_registers": read("sgpr_count"),
        "stack": read("private_segment_fixed_size"),
        "spills": read("vgpr_spill_count"),
        "scalar_spills": read("sgpr_spill_count"),  # one that finds no free lane goes to the private segment
    }


def _source(variant: Variant) -> Any:
    fixed = dict.fromkeys(variant.constexprs, "constexpr")
    signature = {name: variant.signature.get(name, fixed.get(name)) for name in variant.kernel.arg_names}
    missing = [name for name, kind in signature.items() if kind is None]
    if missing:
        raise CompileError(f"{variant.name}: no type and no value for {', '.join(missing)}")
    compiler: Any = importlib.import_module("triton.compiler")
    return compiler.ASTSource(variant.kernel, signature, dict(variant.constexprs), variant.attrs)


def build(variant: Variant) -> Facts:
    """Compiles one variant in this process and reads its facts."""
    triton: Any = importlib.import_module("triton")
    target = devices.target(variant.arch)
    compiled = triton.compile(
        _source(variant),
        target=triton.backends.compiler.GPUTarget(target.backend, target.number, target.warp_size),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    nvidia = target.backend == "cuda"
    need = _nvidia(compiled) if nvidia else _amd(compiled)
    dialect = assembly.PTX if nvidia else assembly.AMD
    loop = assembly.main_loop(compiled.asm["ptx" if nvidia else "amdgcn"], dialect)
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    resident = target.resident(
        warps=variant.num_warps,
        registers=need["registers"] or 0,
        shared=compiled.metadata.shared,
        tensor_columns=columns,
        scalar_registers=need["scalar_registers"] or 0,
    )
    return Facts(
        name=variant.name,
        arch=variant.arch,
        head_dim=variant.head_dim,
        dtype=variant.dtype,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        must_pipeline=variant.pipelined,
        rows=variant.constexprs.get("ROWS"),
        keys=variant.constexprs.get("KEYS"),
        block=variant.constexprs.get("BLOCK"),
        shared=compiled.metadata.shared,
        tensor_columns=columns,
        loop=loop is not None,
        tensor=loop.tensor if loop else 0,
        tensor_kind=loop.tensor_kind if loop else None,
        copies=loop.copies if loop else 0,
        loads=loop.loads if loop else 0,
        wide_loads=loop.wide if loop else 0,
        loads_ahead=loop.ahead if loop else 0,
        waits=loop.waits if loop else (),
        buffers=assembly.buffers(compiled.asm["ttgir"]),
        barriers=loop.barriers if loop else 0,
        shared_stores=loop.shared_stores if loop else 0,
        instructions=loop.instructions if loop else 0,
        warps=assembly.warps(compiled.asm["ttgir"]),
        resident_blocks=resident.blocks,
        resident_warps=resident.warps,
        limit=resident.limit,
        **need,  # type: ignore[arg-type]
    )


def _key(variant: Variant) -> str:
    """Changes with the kernel's source and all it calls, its parameters, the compiler, and the way we read binaries.

    Not with the aims: a fact stays what it is when we ask more of it.
    """
    triton: Any = importlib.import_module("triton")
    readers = (Path(module.__file__ or "").read_bytes() for module in (assembly, devices, sys.modules[__name__]))
    parts = [
        triton.__version__,
        variant.arch,
        variant.name,
        f"{variant.num_warps} {variant.num_stages} {variant.pipelined}",
        _source(variant).hash(),
        " ".join(field.name for field in dataclasses.fields(Facts)),
        *(hashlib.sha256(source).hexdigest() for source in readers),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _remembered(variant: Variant, directory: Path) -> Facts:
    """From the directory if this very variant was compiled before, else compiled and put there."""
    path = directory / f"{_key(variant)}.json"
    try:
        return Facts.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError):  # not there, or cut off while it was written
        pass
    made = build(variant)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(made.to_dict()))
        os.replace(part, path)
    except OSError as error:  # a full or read-only disk costs only the time of compiling again
        print(f"closecall: not remembered in {directory}: {error}", file=sys.stderr)
    return made


def _serve(module: str, directory: Path) -> None:
    """The compiling process: a request a line on stdin, an answer a line on what stdout was when it started."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print to stdout when they fail
    variants = importlib.import_module(module).variants
    known: dict[str, dict[str, Variant]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        arch = request["arch"]
        answer: dict[str, Any]
        try:
            if arch not in known:
                known[arch] = {variant.name: variant for variant in variants(arch)}
            if "name" not in request:
                answer = {"names": list(known[arch])}
            else:
                if request["name"] not in known[arch]:
                    raise unknown(f"{arch} variant", request["name"], known[arch])
                answer = {"facts": _remembered(known[arch][request["name"]], directory).to_dict()}
        except Exception as error:  # whatever a compiler throws is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Compiler:
    """A compiling process, started on first use. Use it as a context manager; one thread at a time."""

    def __init__(self, variants: str = VARIANTS, directory: Path | None = None) -> None:
        if find_spec("triton") is None:
            raise ValueError(
                "compiling GPU kernels needs triton, which is not installed: pip install 'closecall[triton]'"
            )
        self.variants = variants
        self.directory = directory or cache_dir() / "gpu-report"
        self._process: subprocess.Popen[str] | None = None
        self._said: Any = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        if self._said is not None:
            self._said.close()
            self._said = None

    def _start(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, self.variants, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )

    def _ask(self, **request: str) -> dict[str, Any]:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        what = " for ".join(request[key] for key in ("name", "arch") if key in request)
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            self._said.seek(0)
            words = " / ".join(self._said.read().strip().splitlines()[-3:]) or "nothing"
            self.close()  # the next request gets a new process
            raise CompileError(f"{what}: the compiler ended with exit code {code}, saying: {words}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CompileError(f"{what}: {answer['error']}")
        return answer

    def names(self, arch: str) -> list[str]:
        """Of the variants there are for a target."""
        found: list[str] = self._ask(arch=devices.target(arch).arch)["names"]
        return found

    def facts(self, arch: str, name: str) -> Facts:
        return Facts.from_dict(self._ask(arch=devices.target(arch).arch, name=name)["facts"])


if __name__ == "__main__":
    sys.modules[MODULE] = sys.modules[__name__]  # one copy of CompileError and Facts, whoever imports them
    _serve(sys.argv[1], Path(sys.argv[2]))
