"""The theory, made measurable: gaps, closed-form bounds, Monte Carlo, the best trigger share.

`gaps` reads order statistics from rankings, `bounds` is the paper's Appendix D with its assumptions checked,
`monte_carlo` and `triggers` measure what the bounds only bound, and `qstar` prices expansion. (The inequalities behind
`closecall.certify` and the rule `certified` are in `closecall.block_mass`.)

On models: `diagnose` runs one and streams its tiles (`cells`, `loss`) into a `dump`, `analysis` and `signals` say what
is in it, `diagnose_report` and `figures` show it; `calibrate` finds thresholds, `certified` how many rows certify.
"""
