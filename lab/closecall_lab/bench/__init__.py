"""Benchmarks. One runner for all: a benchmark lists cells, measures one cell, and says what its table and plot show.

`timing` times contenders in turn, `store` keeps finished cells, `table` and `plot` show them, `runner` ties them up.
"""
