"""Models we know: facts, shapes, where their weights are and how they are loaded."""
