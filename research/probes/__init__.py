"""Training of the probes."""
