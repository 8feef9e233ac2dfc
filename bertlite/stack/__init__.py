"""BERT itself: read `modules` first, from BertEmbeddings to BertPooler, then `body`.

notebooks/bert_on_one_page.py computes the same in plain PyTorch, without options: read it before.  The stack adds
dropout, other activations and positions, pruned heads and neurons, and decoders with a cache and cross-attention.  It
also adds more backends, layouts without padding, gates, attention weights and hidden states as outputs, every form of
mask, and checkpointing.  A query that may attend to nothing gives zeros here, and nan on the page.

A layer takes hidden states and one value, `LayerContext`: the layout, the backend, the mask, gates, cache, an
encoder's output, and the outputs to return.  It is data, so that everything that computes a layer reads the same
fields: eager, sdpa, packed, varlen, the native kernels, and the parts of bertlite.hf, which translate transformers'
arguments.  The C++ could not read a closure, and one argument for each field would be repeated in every signature.
Each layer gets the value with its own number, and returns attention weights under that number.  So a layer that runs
twice, as under checkpointing, returns them once.
"""
