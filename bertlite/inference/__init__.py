"""Models that only run, faster: all layers in one call of C++ kernels.

native/       the kernels, and the copy of a model whose layers they run
runtime       InferenceModel, which only runs that copy
support       checks of a model's parts
verification  the comparison of the copy with the original
optimize      optimize_for_inference
bodies        the same for encoders inside objects of other libraries
holders       those objects: searched and copied
"""

from bertlite.inference.optimize import optimize_for_inference
from bertlite.inference.runtime import InferenceModel

__all__ = ["InferenceModel", "optimize_for_inference"]
