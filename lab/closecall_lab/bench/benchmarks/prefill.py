"""Times the whole prefill of a model as it is, attached with our kernel run dense, and attached with each policy;
shows where the time goes, and how near we come to what Amdahl's law allows. `closecall profile` has more options."""

from __future__ import annotations

import argparse
from typing import Any

from ...eval.spec import DEFAULT
from ...spine.numbers import TYPES
from ...spine.options import need, one_of
from ...spine.options import shared as add_shared
from ..base import Benchmark
from ..profile.policies import read

HELP = "the whole prefill of a model, not attached and attached"
FULL = {"contexts": "2k,4k,8k", "threads": "all", "budget": "8", "rounds": "5"}
QUICK = {"contexts": "1k,2k", "threads": "all", "budget": "4", "rounds": "2"}  # a budget that cuts something at 1K


def options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "model", "dtype")
    parser.add_argument("--policies", metavar="NAME,...", default=",".join(DEFAULT), help="(%(default)s)")


def make(args: argparse.Namespace, shared: dict[str, Any]) -> Benchmark:
    need(model=args.model)
    from ..profile.model_run import ModelProfile, load
    from ..validate.device import Cpu

    policies = read(args.policies, (shared.pop("budget"),))
    dtype = None if args.dtype is None else one_of("--dtype", TYPES)(args.dtype)
    return ModelProfile(loaded=load(args.model, dtype, Cpu()), policies=policies, name="prefill", **shared)
