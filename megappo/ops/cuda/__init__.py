"""Routes from an op to its CUDA kernel, if the kernel does not take every call. Ops without a file here call the kernel of their
name."""
