"""The benchmarks of `closecall bench`, one file each.

A file gives HELP (one line for the list), FULL and QUICK (default options; `--quick` takes the second),
`options(parser)` for what is its own, and `make(args, shared)`, which returns the benchmark. Its docstring is what
`--help` shows.
"""
