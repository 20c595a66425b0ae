"""The Triton kernels. Importing them needs triton."""
