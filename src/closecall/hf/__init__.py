"""closecall in Hugging Face models: `attach`."""
