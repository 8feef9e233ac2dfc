"""Models that only run, faster: all layers in one call of C++ kernels, or all kernels of a GPU at once.

native/       the copy of a model whose layers the kernels run
graphs        the copy of a model whose forward is replayed on a GPU
quick         the forward that both have
model         InferenceModel, which only runs such a copy
support       checks of a model's parts
verification  the comparison of the copy with the original
readers       the classes of other libraries that read padding
optimize      optimize_for_inference
bodies        the same for encoders inside objects of other libraries
holders       those objects: searched and copied
"""

from bertlite.inference.model import InferenceModel
from bertlite.inference.optimize import optimize_for_inference

__all__ = ["InferenceModel", "optimize_for_inference"]
