"""Each RMSNorm's gain goes into the matrices that read it; the head is untied and takes the last one's."""

import torch
from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "gemma2", "gemma3_text")
# A norm of a layer to the matrices that read it; where a layer has a norm before its MLP of its own, that one.
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
BEFORE_MLP = "pre_feedforward_layernorm"  # Gemma's; its post_attention_layernorm stands before the residual sum


def checkpoint(model: nn.Module) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name, readers in _READERS.items():
            own = BEFORE_MLP if name != "input_layernorm" and hasattr(layer, BEFORE_MLP) else name
            norm = getattr(layer, own)
            gain = _take_gain(norm)
            for path in readers:
                parent, _, child = path.partition(".")
                matrix = getattr(getattr(layer, parent), child, None)
                if matrix is not None:
                    matrix.weight.copy_((matrix.weight.double() * gain).float())
    gain = _take_gain(model.model.norm)  # type: ignore[union-attr]
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = nn.Parameter((head.weight.double() * gain).float(), requires_grad=False)  # no longer the embedding's
    model.config.tie_word_embeddings = False


def gain(norm: nn.Module) -> tuple[Tensor, float]:
    """A norm's gain [C] in float64 and what its weight lacks to it: Gemma's is the gain less one."""
    weight = norm.weight
    one = torch.ones_like(weight)
    unit = (1 + float(getattr(norm, epsilon(norm)))) ** -0.5  # 1 / rms of a row of ones
    kept = weight.clone()
    try:
        for neutral, offset in ((1.0, 0.0), (0.0, 1.0)):
            weight.fill_(neutral)
            if torch.allclose(norm(one).double() / unit, one.double(), rtol=1e-5):
                return kept.double() + offset, offset
    finally:
        weight.copy_(kept)
    raise ValueError(f"{type(norm).__name__}: a weight that is neither the gain nor the gain less one")


def epsilon(norm: nn.Module) -> str:
    """The name of its attribute. Raises ValueError where there is none."""
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return name
    raise ValueError(f"{type(norm).__name__}: got no epsilon, allowed: variance_epsilon, eps")


def _take_gain(norm: nn.Module) -> Tensor:
    """The norm's gain [C] in float64; the norm is left with a gain of one."""
    found, offset = gain(norm)
    norm.weight.fill_(1 - offset)
    return found
