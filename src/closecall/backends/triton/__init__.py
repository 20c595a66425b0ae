"""The Triton kernels and what chooses their launches. Importing the kernels needs triton; `launch` does not."""
