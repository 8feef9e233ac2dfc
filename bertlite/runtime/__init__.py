"""Run packed models without torch: numpy, tokenizers and the compiled kernels.  It imports no other room of bertlite.

    from bertlite import runtime  # with the wheel of the runtime alone: import bertlite_runtime as runtime
    model = runtime.load("packed")  # a folder that `bertlite pack` wrote
    vectors = model.encode(["Time flies like an arrow."])

The wheel of the runtime has this room under the name bertlite_runtime.

tasks      the calls of a folder: encode, predict, rank, tag
options    their options, and answers to arguments of other libraries
processing the steps before and after the model, as plain data
texts      texts to token ids
pooling    the states of tokens to a vector, and the functions of vectors and scores
tagging    labelled spans from the scores of tokens
encoder    the model: token ids in, states out
packed     the file of packed weights
contents   the two descriptions in a folder, and the tensors that must be in it
fields     rules for the fields of a description
shapes     the sizes of a stack, and where each weight lies
structs    the C functions of the kernels, and their structs
library    the kernels: found, or compiled once; self_test checks them
kernels/   the kernels, in C++
"""

from .library import NativeKernelsError
from .tasks import PackedModel

load = PackedModel  # the model of a folder
__all__ = ["NativeKernelsError", "PackedModel", "load"]
