"""Models on a GPU: a forward or a training step is recorded once, and all its kernels are replayed at once.

graphs           the copy of a model whose forward is replayed, by buckets of shapes
training         TrainingStep: forward, backward and optimizer, replayed
fused            modules with fewer kernels, where Triton is
triton_kernels   kernels around matmuls
short_attention  the kernel for short sequences
ahead            inputs made ahead and results read late, so that neither side waits
"""
