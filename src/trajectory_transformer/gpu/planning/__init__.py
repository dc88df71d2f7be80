"""Planning on a GPU: one kernel per run of slots, one CUDA graph per search."""
