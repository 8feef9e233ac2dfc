"""The native backend: all layers of a model in one call of C++ kernels, on packed tokens.

weights     a model's weights, packed
encoder     NativeEncoder, in place of BertEncoder
conversion  the copy of a model that has it, or the reason why not
saving      packed weights saved, and read again
model       the forward in one call
linear      a linear layer outside the encoder
choice      whether the kernels are used
"""
