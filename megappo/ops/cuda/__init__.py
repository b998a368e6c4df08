"""Routes from an op to its CUDA kernel where the kernel does not take every call. Other ops call the kernel of their name."""
