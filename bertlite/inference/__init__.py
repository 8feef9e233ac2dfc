"""Models that only run, faster: matmuls with packed weights, fused with the operations after them.

linear      FixedLinear, and with a weight packed for oneDNN PackedLinear and Int8Linear
fusion      layers with as few matmuls as they can have, and the copy of a model that is built of them
native/     all layers in one call of C++ kernels
runtime     InferenceModel, which only runs that copy
support     checks of what this torch can compute and of what the model is made of
optimize    optimize_for_inference
"""

from bertlite.inference.optimize import optimize_for_inference
from bertlite.inference.runtime import InferenceModel

__all__ = ["InferenceModel", "optimize_for_inference"]
