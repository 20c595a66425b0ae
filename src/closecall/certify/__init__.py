"""Certificates: per-row upper bounds on what a selection dropped."""
