"""The native backend: all layers of a model in one call of C++ kernels, on packed tokens.

kernels/    the C++: vectors, functions, tiles, rows, attention, threads, weights, encoder, native
library     finds or compiles it
calls       its functions and structs
weights     a model's weights, packed
encoder     NativeEncoder, in place of BertEncoder
conversion  the copy of a model that has it, or the reason why not
saving      packed weights saved, and read again
model       the forward in one call
linear      a linear layer outside the encoder
choice      whether the kernels are used
self_test   one small layer, before the kernels are used
"""
