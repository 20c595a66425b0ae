"""closecall inside other people's programs."""
