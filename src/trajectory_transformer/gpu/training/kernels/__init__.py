"""Triton kernels of the fused bfloat16 training step, and of the baselines (`perceptron`).

They fuse operations that torch.compile keeps separate. No kernel uses atomics, so results are deterministic. Only
`gpu.training.operations` and `gpu.training.perceptrons` import them.
"""
