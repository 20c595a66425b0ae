"""Tuning: budgets by layer and head for a model, on its owner's text."""
