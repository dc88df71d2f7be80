"""Planning on a GPU: whole runs of slots in one kernel, a whole search in one CUDA graph."""
