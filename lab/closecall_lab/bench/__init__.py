"""Speed: benchmarks of kernels, profiles of whole prefills, and validation on a device.

`base` says what a benchmark is and runs it; `benchmarks/` holds one file each, found by scanning; `profile/` splits
prefill time into its parts; `validate/` checks and times a device; `check` compares with committed ratios.
"""
