"""What a training step in bfloat16 is made of on a GPU, in Triton.

The kernels fuse what a compiler leaves apart. Nothing is added up by atomics, so results repeat bit by bit. Only
`training.operations` imports them.
"""
