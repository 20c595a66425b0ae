"""Where prefill time goes: a model or one layer of its true shape, split into selection, attention and the rest.

`parts` splits one prefill, `prefills` runs contenders in turn, `model_run` and `shape_run` are benchmarks of the frame
in `closecall_lab.bench.base`, `tables`, `figures` and `pareto` show what was measured.
"""
