"""Linear layers in int8, for decoding on a CPU: a weight is a quarter of its size in float32.

    y[n, out] = (x int8 [n, in] . W int8 [out, in]^T) * x's scale [n] * W's scale [out]

Each output channel of a weight has one scale, and so has each row of the activations. Integers are
multiplied and added exactly, and each row has its own scale, so no row of a batch changes another.
Between the layers everything stays in the engine's dtype. Embeddings are looked up, not multiplied, so they
also stay in that dtype; an output layer that shares their weight gets its own int8 copy.

Not here: when a model is quantized (`policy.py`), which is after it was loaded and verified.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from echo2d.errors import EngineFault

_LEVELS = 127  # levels on either side of 0
# int32 holds the sum of this many products of two int8 numbers.
IN_FEATURES_MAX = (1 << 31) // _LEVELS**2

Int8Layers = dict[str, list["Int8Linear"]]


class Int8Linear(nn.Linear):
    """A linear layer without gradients. weight: int8 [out, in]; scales: float32 [out]."""

    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        """EngineFault: the layer is wider than int32 can add up."""
        nn.Module.__init__(self)
        if layer.in_features > IN_FEATURES_MAX:
            raise EngineFault(
                f"int8: a linear layer has {layer.in_features} inputs, at most {IN_FEATURES_MAX} fit; "
                'set worker.quantization = "none"'
            )
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, scales = quantized(layer.weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = layer.bias

    def load(self, weight: Tensor) -> None:
        """Compute with this weight [out, in] of any dtype from now on."""
        numbers, scales = quantized(weight)
        self.weight.copy_(numbers)
        self.scales.copy_(scales)

    def forward(self, states: Tensor) -> Tensor:
        numbers, scales = quantized(states.reshape(-1, self.in_features))
        # torch has no public name for this product.
        product = torch._int_mm(numbers, self.weight.t()).to(torch.float32)  # noqa: SLF001
        product.mul_(scales[:, None]).mul_(self.scales)
        if self.bias is not None:
            product += self.bias
        return product.to(states.dtype).view(*states.shape[:-1], self.out_features)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 numbers [n, m] and the float32 scales [n] whose products are nearest to these rows."""
    rows = rows.to(torch.float32)
    scales = rows.abs().amax(dim=1).div_(_LEVELS)
    # Any scale above 0 will do for a row of zeros.
    scales.clamp_min_(torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round_().to(torch.int8), scales


def quantize(model: Any) -> Int8Layers:
    """Replace all linear layers of a model. EngineFault: it has none.

    Returns them by the names that their weights had in `state_dict`. A weight that an embedding
    shares has two names.
    """
    names = defaultdict(list)
    for name, tensor in model.state_dict().items():
        names[tensor.data_ptr()].append(name)
    layers: Int8Layers = defaultdict(list)
    linear = [each for each in model.named_modules() if isinstance(each[1], nn.Linear)]
    for path, layer in linear:
        replaced = Int8Linear(layer)
        model.set_submodule(path, replaced)
        for name in names[layer.weight.data_ptr()]:
            layers[name].append(replaced)
    if not layers:
        raise EngineFault(
            'int8: the model has no linear layers of torch; set worker.quantization = "none"'
        )
    return dict(layers)
