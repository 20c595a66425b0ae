"""What can be told about the GPU kernels without a GPU: what they compile to."""
