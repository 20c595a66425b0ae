"""Evaluation: what is run, how one example is measured, where results live, and what they mean."""

from ..matched_rule import Even as Even  # registered, because stored policies of the matched control name it
