"""BERT itself: read `modules` first, from BertEmbeddings to BertPooler, then `body`.

notebooks/bert_on_one_page.py computes the same in plain PyTorch, without options, and is the page to read before.  To
it the stack adds dropout, other activations and positions, pruned heads and neurons, decoders with a cache and
cross-attention, backends beside eager and layouts without padding, gates, attention weights and hidden states as
outputs, every form of mask, zeros where a query may attend to nothing (the page gives nan), and checkpointing.

A layer takes hidden states and one value, `LayerContext`: the layout, the backend, the mask as read, gates, cache, an
encoder's output, and what is to be returned.  It is data, so that whatever computes a layer reads the same fields:
eager, sdpa, packed, varlen, the native kernels, and the parts of bertlite.hf, which translate transformers' arguments.
Tried on paper and left: a closure over backend, mask and layout, which the C++ would have to open again; and one
argument for each field, a list that every signature between the body and a head would repeat.
Each layer gets the value with its own number, and hands attention weights back under that number, so that a layer
which is run twice, as under checkpointing, gives them once.
"""
