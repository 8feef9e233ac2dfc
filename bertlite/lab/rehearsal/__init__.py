"""A rehearsal of the forward paths on CUDA tensors that no GPU holds: no proof, but it finds what would fail first.

device      tensors that say that they are on a GPU, and a note of each wait and each mix-up of devices
stand_ins   what takes the place of kernels that need a GPU
backward    the backward pass of such tensors
paths       the list of forward paths, and how often each may wait
command     run them, print a table and a verdict, write a record
"""
