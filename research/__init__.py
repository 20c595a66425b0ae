"""What only we run: the paper's tables and probe training. Never installed."""
