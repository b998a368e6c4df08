"""What stands between an op and its CUDA kernel where the kernel does not take every call. Ops without a file here go straight to
the kernel of their name."""
