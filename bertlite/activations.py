"""The activations that a checkpoint may name in `hidden_act`, by transformers' names.

Formulas are those of transformers' ACT2FN (5.23.0; hardswish and sqrtsoftplus are not in 4.57.6).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]
ONLY_HERE = "bertlite:"  # before a `hidden_act` on disk that others must not load: see `bertlite.config.BertConfig`


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_tanh_halved_first(x: Tensor) -> Tensor:  # the same formula; float rounding follows the order
    return x * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class XIELU(nn.Module):
    """xIELU with its two learned slopes (arXiv:2411.13010).  Attribute names are checkpoint keys."""

    beta: Tensor
    eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1, dtype=torch.bfloat16))
        self.alpha_n = nn.Parameter(torch.empty(1, dtype=torch.bfloat16))
        self.register_buffer("beta", torch.empty((), dtype=torch.bfloat16))
        self.register_buffer("eps", torch.empty((), dtype=torch.bfloat16))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for alpha, start in ((self.alpha_p, 0.8), (self.alpha_n, 0.8 - 0.5)):
            alpha.copy_(torch.tensor(start, dtype=torch.bfloat16).expm1().log())  # softplus(alpha) == start
        self.beta.fill_(0.5)
        self.eps.fill_(-1e-6)

    def forward(self, x: Tensor) -> Tensor:
        above = F.softplus(self.alpha_p) * x * x + self.beta * x
        below = (torch.expm1(torch.min(x, self.eps)) - x) * (self.beta + F.softplus(self.alpha_n)) + self.beta * x
        return torch.where(x > 0, above, below)


ACTIVATIONS: dict[str, Function | type[nn.Module]] = {
    "gelu": F.gelu,
    "gelu_10": lambda x: F.gelu(x).clip(-10, 10),
    "gelu_accurate": gelu_tanh,
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "gelu_new": gelu_tanh,
    "gelu_python": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_python_tanh": gelu_tanh_halved_first,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0)))),
    "leaky_relu": F.leaky_relu,
    "linear": lambda x: x,
    "mish": F.mish,
    "prelu": nn.PReLU,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "swish": F.silu,
    "tanh": torch.tanh,
    "xielu": XIELU,
}


class Activation(nn.Module):
    """A function of ACTIVATIONS as a module, so that it has a module name and can be hooked."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](x)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return self.name


def activation(name: str) -> nn.Module:
    """Make the module for one name of ACTIVATIONS; only `prelu` and `xielu` carry parameters."""
    name = name.removeprefix(ONLY_HERE)
    entry = ACTIVATIONS[name]
    return entry() if isinstance(entry, type) else Activation(name)
