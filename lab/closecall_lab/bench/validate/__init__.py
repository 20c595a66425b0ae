"""The validation kit: is closecall right on this device, and how fast is it? For machines nobody here has seen.

`cases` lists what is checked, `exact` says in float64 what is right and how far off a correct answer may be, `check`
holds a backend against it, and `spot` some cells of what is timed. `behaviour` looks at repeats, graphs, streams and
other GPUs. `speed` times on the keys of `draws`, against `rivals`; `launched` and `hardware` say under what conditions.
`device` is the seam to CPU and GPU, `graphs` its CUDA graphs. `runner` ties them up, `report` and `verdict` tell.
"""
