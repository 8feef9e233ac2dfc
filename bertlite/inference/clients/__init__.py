"""Encoders inside objects of other libraries: they are found, replaced by optimised copies, and compared.

holders       those objects: searched and copied
bodies        the encoders in them, replaced
readers       the parts around them that read padding
pooling       sentence-transformers' pooling, as the runtime computes it
verification  the comparison of a copy with the original
"""
