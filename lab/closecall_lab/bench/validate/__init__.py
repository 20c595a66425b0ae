"""The validation kit: is closecall right on this device, and how fast is it? For machines nobody here has seen.

`cases` lists what is checked, `exact` says in float64 what is right and how far off a correct answer may be, `check`
holds a backend against it, `speed` times, `device` is the seam to CPU and GPU, `runner` ties them up.
"""
