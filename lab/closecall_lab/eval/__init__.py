"""Evaluation: what is run, how one example is measured, where results live, and what they mean."""
