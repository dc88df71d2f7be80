"""Training on a GPU: fused kernels, one CUDA graph per step."""
