"""BERT itself: read `modules` first, from BertEmbeddings to BertPooler, then `body`.

A layer takes hidden states and one value, `LayerInputs`: the layout, the backend, the mask as read, gates, cache, an
encoder's output, and what is to be returned.  It is data, so that whatever computes a layer reads the same fields:
eager, sdpa, packed, varlen, the native kernels, and the parts of bertlite.hf, which translate transformers' arguments.
Tried on paper and left: a closure over backend, mask and layout, which the C++ would have to open again; and one
argument for each field, a list that every signature between the body and a head would repeat.
Each layer gets the value with its own number, and hands attention weights back under that number, so that a layer
which is run twice, as under checkpointing, gives them once.
"""
