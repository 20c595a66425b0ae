"""Selectors against each other at equal measured budget: answers, captured layers, and what choosing costs."""
