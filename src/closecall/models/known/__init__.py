"""One file per model we know, each with its `ENTRY`. A new file is all that a new model takes."""
