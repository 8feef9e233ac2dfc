"""Models that run on a GPU: forwards and training steps replayed as graphs, and kernels in Triton."""
