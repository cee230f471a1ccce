"""Each RMSNorm's gain goes into the matrices that read it; the head is untied and takes the last one's."""

import torch
from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "gemma2", "gemma3_text")
# A norm of a layer to the matrices that read it; where a layer has a norm before its MLP of its own, that one.
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
_BEFORE_MLP = "pre_feedforward_layernorm"  # Gemma's; its post_attention_layernorm stands before the residual sum


def checkpoint(model: nn.Module) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name, readers in _READERS.items():
            own = _BEFORE_MLP if name != "input_layernorm" and hasattr(layer, _BEFORE_MLP) else name
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


def _take_gain(norm: nn.Module) -> Tensor:
    """The norm's gain [C] in float64; the norm is left with a gain of one. Gemma's weight is the gain less one."""
    weight = norm.weight
    one = torch.ones_like(weight)

    def gain() -> Tensor:
        return norm(one).double() / _unit(norm)

    kept = weight.clone().double()
    for neutral, offset in ((1.0, 0.0), (0.0, 1.0)):
        weight.fill_(neutral)
        if torch.allclose(gain(), one.double(), rtol=1e-5):
            return kept + offset
    raise ValueError(f"{type(norm).__name__}: a weight that is neither the gain nor the gain less one")


def _unit(norm: nn.Module) -> float:
    """1 / rms of a row of ones."""
    epsilon = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0)
    return float((1 + epsilon) ** -0.5)
