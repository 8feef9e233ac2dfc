"""Models that only run, faster: all layers in one call of C++ kernels, or all kernels of a GPU at once.

native/       the copy of a model whose layers the kernels run
gpu/          the copy of a model whose forward is replayed on a GPU, training steps that are, and kernels in Triton
clients/      the same for encoders inside objects of other libraries, and the comparison of a copy with the original
quick         the forward that both copies have
model         InferenceModel, which only runs such a copy
checks        checks of a model's parts
optimize      optimize_for_inference
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertlite.inference.gpu.training import TrainingStep as TrainingStep
    from bertlite.inference.model import InferenceModel as InferenceModel
    from bertlite.inference.optimize import optimize_for_inference as optimize_for_inference

    __all__: list[str]
else:
    from bertlite.support.extras import on_demand

    __getattr__, __dir__ = on_demand(__name__)
