"""What only we run: the paper's tables, probe training, models on paper. Never installed."""
