"""Reports: what a store of results says, in tables, plots and one page; and the paper's experiments, run again."""
