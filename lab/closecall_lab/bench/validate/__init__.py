"""The validation kit: is closecall right on this device, and how fast is it? For devices that we have not seen.

- `cases` lists what is checked. `exact` says in float64 what is right, and how far off a correct answer may be. `check`
  compares a backend with that, and `spot` some cells of what is timed.
- `behaviour` checks repeats, graphs, streams and other GPUs.
- `speed` times on the keys of `draws`, against `rivals`. `launched` and `hardware` record the conditions.
- `device` is the interface to CPU and GPU, `graphs` its CUDA graphs.
- `runner` runs all of it; `report` and `verdict` write what came out.
"""
