"""closecall-lab: evaluation, benchmarks, theory and compile facts for closecall."""
