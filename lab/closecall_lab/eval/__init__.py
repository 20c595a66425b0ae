"""Evaluation: what is run, how one example is measured, where results live, and what they mean."""

from closecall.rules.even import Even as Even  # registered, because stored policies of the matched control name it
