"""The options of `closecall bench`, and what they mean."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from closecall.policy import PRESETS, Policy, accepted, policy

from ..spine.options import count, counts, each, one_of

Benchmarks = Any  # argparse's sub-parser collection, whose type is private

TYPES = ("fp32", "bf16", "fp16")
ATTENTION = {"contexts": "4k,8k,16k,32k,64k,128k", "dims": "128,64", "threads": "1,all", "seconds": 20.0}
ATTENTION_QUICK = {"contexts": "2k,4k,8k,16k", "dims": "128", "threads": "1", "seconds": 4.0}
DECODE = {"contexts": "4k,16k,32k,64k,128k", "dims": "128", "threads": "1,all", "seconds": 3.0}
DECODE_QUICK = {"contexts": "4k,16k", "dims": "128", "threads": "1,all", "seconds": 1.0}
GROWTH = {"contexts": "8k,16k,32k,64k,128k,256k,512k,1024k", "dims": "128", "threads": "1", "seconds": 20.0}
GROWTH_QUICK = {"contexts": "8k,16k,32k", "dims": "128", "threads": "1", "seconds": 4.0}
PREFILL = {"contexts": "2k,4k,8k", "threads": "all", "seconds": 60.0}
PREFILL_QUICK = {"contexts": "1k,2k", "threads": "all", "seconds": 10.0}


def _threads(text: str) -> int:
    import torch

    return torch.get_num_threads() if text == "all" else count("--threads")(text)


def _default(key: str, full: dict[str, Any], quick: dict[str, Any]) -> str:
    return f"default {full[key]}; with --quick {quick[key]}"


def _tensors(parser: argparse.ArgumentParser, full: dict[str, Any], quick: dict[str, Any], heads: int, kv: int) -> None:
    """Of benchmarks that make their own tensors."""
    parser.add_argument("--dtypes", metavar="TYPE,...", default="fp32,bf16", help="of fp32, bf16, fp16 (%(default)s)")
    parser.add_argument("--dims", metavar="D,...", help=f"head dims ({_default('dims', full, quick)})")
    parser.add_argument("--heads", metavar="H", default=str(heads), help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", metavar="H", default=str(kv), help="key heads (%(default)s)")


def _shared(parser: argparse.ArgumentParser, full: dict[str, Any], quick: dict[str, Any]) -> None:
    def default(key: str) -> str:
        return _default(key, full, quick)

    parser.add_argument("--quick", action="store_true", help="a small run: shorter contexts and fewer cells")
    parser.add_argument("--contexts", "--context", metavar="N,...", help=f"lengths, k for 1024 ({default('contexts')})")
    parser.add_argument("--threads", metavar="N,...", help=f"thread counts, `all` among them ({default('threads')})")
    parser.add_argument("--isa", metavar="TIER", help="an instruction-set tier of `closecall info` (the best one)")
    parser.add_argument("--seconds", metavar="S", type=float, help=f"time to spend on a cell ({default('seconds')})")
    parser.add_argument(
        "--repeats", metavar="N", default="15", help="most rounds per cell; at least 3 run (%(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("out/bench"), help="where results go (%(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")


def _policies(parser: argparse.ArgumentParser, names: str, budget: int) -> None:
    parser.add_argument("--policies", metavar="NAME,...", default=names, help="presets to time (%(default)s)")
    parser.add_argument(
        "--budget", metavar="K", default=str(budget), help="budget in blocks; tiles keep twice that (%(default)s)"
    )


def _chosen(args: argparse.Namespace, known: tuple[str, ...]) -> tuple[Policy, ...]:
    budget = count("--budget")(args.budget)
    names = each("--policies", args.policies, one_of("--policies", known))
    return tuple(policy(name, **accepted(name, {"budget": budget})) for name in names)


def _common(args: argparse.Namespace, full: dict[str, Any], quick: dict[str, Any]) -> dict[str, Any]:
    """What all benchmarks take, read and checked."""
    from closecall.backends import cpu

    chosen = quick if args.quick else full
    given = {key: value if (value := getattr(args, key)) is not None else chosen[key] for key in full}
    if not given["seconds"] > 0:
        raise ValueError(f"--seconds must be above 0, got {given['seconds']}")
    if args.isa:
        os.environ["CLOSECALL_ISA"] = one_of("--isa", tuple(cpu.tiers()))(args.isa)
    return {
        "contexts": counts("--contexts", given["contexts"]),
        "threads": each("--threads", given["threads"], _threads),
        "repeats": count("--repeats")(args.repeats),
        "seconds": given["seconds"],
    }


def _grid(args: argparse.Namespace, full: dict[str, Any], quick: dict[str, Any]) -> dict[str, Any]:
    """The same, with the tensors to make."""
    heads, kv_heads = count("--heads")(args.heads), count("--kv-heads")(args.kv_heads)
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    return _common(args, full, quick) | {
        "dtypes": each("--dtypes", args.dtypes, one_of("--dtypes", TYPES)),
        "dims": counts("--dims", args.dims or (quick if args.quick else full)["dims"]),
        "heads": heads,
        "kv_heads": kv_heads,
    }


def _attention(benchmarks: Benchmarks) -> None:
    parser = benchmarks.add_parser(
        "attention",
        help="selection + attention over whole prompts",
        description="Times selection + attention over a whole prompt against torch SDPA, our own kernel run dense,\n"
        "and compiled FlexAttention on the same blocks. Finished cells are kept: the same command goes on\n"
        "where it was stopped.",
    )
    _shared(parser, ATTENTION, ATTENTION_QUICK)
    _tensors(parser, ATTENTION, ATTENTION_QUICK, heads=4, kv=1)
    _policies(parser, names="router-on-quest", budget=33)
    parser.add_argument(
        "--baselines", metavar="NAME,...", help="of sdpa, dense, flex (default all; with --quick no flex)"
    )

    def run(args: argparse.Namespace) -> None:
        from . import attention, runner

        known = tuple(n for n in PRESETS if n != "dense")
        baselines = args.baselines or ("sdpa,dense" if args.quick else "sdpa,dense,flex")
        bench = attention.AttentionBench(
            policies=_chosen(args, known),
            baselines=each("--baselines", baselines, one_of("--baselines", attention.BASELINES)),
            **_grid(args, ATTENTION, ATTENTION_QUICK),
        )
        runner.run(bench, args.out, fresh=args.fresh)

    parser.set_defaults(run=run)


def _decode(benchmarks: Benchmarks) -> None:
    parser = benchmarks.add_parser(
        "decode",
        help="one query row over a long cache",
        description="Times one query row over a long cache, every key read, against torch SDPA.",
    )
    _shared(parser, DECODE, DECODE_QUICK)
    _tensors(parser, DECODE, DECODE_QUICK, heads=32, kv=8)

    def run(args: argparse.Namespace) -> None:
        from . import decode, runner

        runner.run(decode.DecodeBench(**_grid(args, DECODE, DECODE_QUICK)), args.out, fresh=args.fresh)

    parser.set_defaults(run=run)


def _prefill(benchmarks: Benchmarks) -> None:
    parser = benchmarks.add_parser(
        "prefill",
        help="the whole prefill of a model, not attached and attached",
        description="Times the whole prefill of a model as it is, attached with our kernel run dense, and attached\n"
        "with each policy; shows attention's share of it, and how near we come to what Amdahl's law then allows.",
    )
    parser.add_argument(
        "--model", metavar="NAME", required=True, help="smollm2, another of `closecall models`, a hub id or a directory"
    )
    _shared(parser, PREFILL, PREFILL_QUICK)
    parser.add_argument("--dtype", metavar="TYPE", help="fp32, bf16 or fp16 (the type the weights were saved in)")
    _policies(parser, names="dense,topk,quest,router,router-on-quest", budget=8)

    def run(args: argparse.Namespace) -> None:
        given = _common(args, PREFILL, PREFILL_QUICK)
        policies = _chosen(args, tuple(PRESETS))
        dtype = None if args.dtype is None else one_of("--dtype", TYPES)(args.dtype)

        from closecall.models.load import load_model

        from . import prefill, runner

        bench = prefill.PrefillBench(loaded=load_model(args.model, dtype=dtype), policies=policies, **given)
        for warning in bench.warnings:
            print(f"closecall: {warning}", file=sys.stderr, flush=True)
        runner.run(bench, args.out, fresh=args.fresh)

    parser.set_defaults(run=run)


def _growth(benchmarks: Benchmarks) -> None:
    parser = benchmarks.add_parser(
        "growth",
        help="time, memory and selection's share from 8K to a million tokens",
        description="Times selection and attention over whole prompts, and measures their memory, from 8K to a\n"
        "million tokens, and fits exponents. Dense attention of long prompts, which would take hours, is measured on\n"
        "fewer rows and multiplied, and marked so. Finished cells are kept: the same command goes on.",
    )
    _shared(parser, GROWTH, GROWTH_QUICK)
    _tensors(parser, GROWTH, GROWTH_QUICK, heads=4, kv=1)
    _policies(parser, names="router-on-quest:pool=8,auto:pool=8", budget=33)

    def run(args: argparse.Namespace) -> None:
        from . import growth, runner
        from .profile import variants

        listed = variants.read(args.policies, (count("--budget")(args.budget),), dense=False)
        bench = growth.GrowthBench(variants=listed, **_grid(args, GROWTH, GROWTH_QUICK))
        runner.run(bench, args.out, fresh=args.fresh)

    parser.set_defaults(run=run)


BENCHMARKS = (_attention, _decode, _prefill, _growth)


def add(benchmarks: Benchmarks) -> None:
    for benchmark in BENCHMARKS:
        benchmark(benchmarks)


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed against torch, with a table and a plot",
        description="Times our kernels and their rivals in turn, in one loop, and reports medians of ratios.",
    )
    parser.set_defaults(run=lambda _: parser.print_help())
    add(parser.add_subparsers(title="benchmarks", metavar="BENCHMARK"))


COMMANDS = (add_bench,)
