"""Triton kernels of the fused bfloat16 training step.

They fuse operations that torch.compile keeps separate. No kernel uses atomics, so results are deterministic. Only
`gpu.training.operations` imports them.
"""
