"""The residual stream divided by a power of two, where float16 cannot hold it: some models sum up to beyond 65,504.

What is added to the stream is scaled, and so is the epsilon of the norms that read it (its square): exact in float32,
but for a gain that is kept less one, which is rounded.
"""

import math

from torch import nn

from kvgate.weights import fold

FAMILIES = fold.FAMILIES
_WRITE = ("o_proj", "down_proj")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")  # Gemma's norms between a matrix and the sum


def checkpoint(model: nn.Module, by: float = 1 / 32) -> None:
    """Raises ValueError where `by` is no power of two."""
    if by <= 0 or math.frexp(by)[0] != 0.5:
        raise ValueError(f"by: got {by:g}, allowed: a power of two")
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)  # no longer the embedding's
    model.config.tie_word_embeddings = False
    model.get_input_embeddings().weight.mul_(by)  # type: ignore[operator]
    for layer in model.model.layers:  # type: ignore[union-attr]
        sandwich = hasattr(layer, fold.BEFORE_MLP)
        for name in _AFTER if sandwich else ():
            norm = getattr(layer, name)
            gain, offset = fold.gain(norm)
            norm.weight.copy_((gain * by - offset).float())
        for name, module in layer.named_modules():
            if not sandwich and name.rpartition(".")[2] in _WRITE:
                module.weight.mul_(by)
                if module.bias is not None:
                    module.bias.mul_(by)
        _quiet(layer.input_layernorm, by)
        _quiet(getattr(layer, fold.BEFORE_MLP) if sandwich else layer.post_attention_layernorm, by)
    _quiet(model.model.norm, by)  # type: ignore[union-attr, arg-type]


def _quiet(norm: nn.Module, by: float) -> None:
    name = fold.epsilon(norm)
    setattr(norm, name, float(getattr(norm, name)) * by * by)
