"""The options of `closecall validate`, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...spine.numbers import TYPES
from ...spine.options import count, counts, each, one_of

Commands = Any  # argparse's sub-parser collection, whose type is private

# On a GPU the attention layers of Qwen2.5-7B, the paper's model of the speed table; on a CPU what it can do in minutes.
CUDA: dict[str, Any] = {
    "contexts": "8k,16k,32k,64k,128k",
    "dtype": "bf16",
    "heads": "28",
    "kv_heads": "4",
    "dim": "128",
    "intermediate": "18944",
    "budget": "33",
    "inputs": "gaussian,clustered",
    "seconds": 20.0,
}
CPU = CUDA | {"contexts": "8k,16k,32k", "dtype": "fp32", "heads": "4", "kv_heads": "1", "intermediate": "2048"}
QUICK: dict[str, dict[str, Any]] = {
    "cuda": {"contexts": "8k,32k", "inputs": "gaussian", "seconds": 3.0},
    "cpu": {
        "contexts": "2k,4k",
        "dim": "64",
        "intermediate": "1024",
        "budget": "8",
        "inputs": "gaussian",
        "seconds": 1.0,
    },
}


def add_validate(commands: Commands) -> None:
    parser = commands.add_parser(
        "validate",
        help="is it right and fast on this device? checks against the reference, then timings",
        description="Checks a backend against the reference and float64 on a fixed list of cases, and that it gives\n"
        "the same bits again, on every stream and GPU, and from a CUDA graph. Then times all dense attention there is\n"
        "and our policies in turn. Writes one JSON and one Markdown file, and ends with a verdict: right or not, and\n"
        "from which context on faster than the best dense.\n"
        "Finished work is kept: the same command continues, and repeats what failed.\n"
        "The exit code is 1 if anything is wrong.",
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:1 (cuda where there is one)")
    parser.add_argument(
        "--backend", metavar="NAME", default="auto", help="what to validate (auto: triton on cuda, else the CPU's best)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="shorter contexts, fewer rounds, no FlexAttention on a CPU"
    )
    parser.add_argument("--case", metavar="PATTERN", action="append", default=[], help="only cases like 'decode*'")
    parser.add_argument("--list", action="store_true", help="name the cases and exit")
    parser.add_argument("--no-timing", action="store_true", help="check only")
    parser.add_argument("--vllm", metavar="MODEL", help="also run MODEL in vLLM, with its attention and with ours")

    def default(key: str) -> str:
        quick = "; ".join(f"with --quick {QUICK[d][key]} ({d})" for d in QUICK if key in QUICK[d])
        both = CUDA[key] if CUDA[key] == CPU[key] else f"{CUDA[key]} on cuda, {CPU[key]} on a CPU"
        return f"{both}{'; ' if quick else ''}{quick}"

    parser.add_argument("--contexts", "--context", metavar="N,...", help=f"to time ({default('contexts')})")
    parser.add_argument("--dtype", metavar="TYPE", help=f"to time: fp32, bf16 or fp16 ({default('dtype')})")
    parser.add_argument("--heads", metavar="H", help=f"query heads ({default('heads')})")
    parser.add_argument("--kv-heads", metavar="H", help=f"key heads ({default('kv_heads')})")
    parser.add_argument("--dim", metavar="D", help=f"head dim ({default('dim')})")
    parser.add_argument("--intermediate", metavar="N", help=f"width of the layer's MLP ({default('intermediate')})")
    parser.add_argument("--budget", metavar="K", help=f"in blocks; tiles keep twice that ({default('budget')})")
    parser.add_argument(
        "--contenders",
        metavar="NAME,...",
        help="beside the dense attention of others: of dense, topk, quest, router, router-on-quest, auto, flex (all)",
    )
    parser.add_argument("--inputs", metavar="KIND,...", help=f"keys to time on ({default('inputs')})")
    parser.add_argument("--seconds", metavar="S", type=float, help=f"for a context ({default('seconds')})")
    parser.add_argument("--repeats", metavar="N", default="15", help="most rounds; at least 3 run (%(default)s)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/validate"), help="(%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="do again what is there already")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    from . import behaviour, cases, device, runner

    if args.list:
        print("\n".join(case.name for case in behaviour.EVERYTHING))
        return
    chosen = cases.matching(args.case, behaviour.EVERYTHING)
    on = device.pick(args.device)
    settings = None if args.no_timing else _settings(args, on.place.type)
    if not runner.run(on, args.backend, chosen, settings, args.out, fresh=args.fresh, vllm_model=args.vllm):
        raise SystemExit(1)


def _settings(args: argparse.Namespace, place: str) -> Any:
    from . import draws, speed

    defaults = (CPU if place == "cpu" else CUDA) | (QUICK["cpu" if place == "cpu" else "cuda"] if args.quick else {})
    chosen = {key: value if (value := getattr(args, key)) is not None else defaults[key] for key in CUDA}
    numbers = {
        key: count(f"--{key.replace('_', '-')}")(chosen[key])
        for key in ("heads", "kv_heads", "dim", "intermediate", "budget")
    }
    if numbers["heads"] % numbers["kv_heads"]:
        raise ValueError(f"--heads {numbers['heads']} is not a multiple of --kv-heads {numbers['kv_heads']}")
    if not chosen["seconds"] > 0:
        raise ValueError(f"--seconds must be above 0, got {chosen['seconds']}")
    without_flex = tuple(name for name in speed.CONTENDERS if name != speed.FLEX)
    contenders = without_flex if args.quick and place == "cpu" else speed.CONTENDERS
    if args.contenders is not None:
        contenders = each("--contenders", args.contenders, one_of("--contenders", speed.CONTENDERS))
    return speed.Speed(
        contexts=counts("--contexts", chosen["contexts"]),
        dtype=one_of("--dtype", TYPES)(chosen["dtype"]),
        contenders=contenders,
        repeats=count("--repeats")(args.repeats),
        inputs=each("--inputs", chosen["inputs"], one_of("--inputs", draws.KINDS)),
        seconds=chosen["seconds"],
        **numbers,
    )


COMMANDS = (add_validate,)
