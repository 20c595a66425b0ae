"""Evaluation: what is run, how one example is measured, where results live, and what they mean."""

from ..selectors.even_rule import Even as Even  # registered, because stored policies of the matched control name it
