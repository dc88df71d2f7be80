"""Training on a GPU: fused kernels, a whole step in one CUDA graph."""
