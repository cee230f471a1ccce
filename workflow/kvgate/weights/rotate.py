"""The residual stream in another basis: no channel is an outlier there. Includes `fold`.

Q orthogonal: embedding E Q, matrices that read W Q, matrices that write Q^T W. The host looks up E Q.
After QuaRot (arXiv 2404.00456) and SpinQuant (arXiv 2405.16406).
"""

from torch import nn

from kvgate.checkpoint import precise
from kvgate.prepare import orthogonal
from kvgate.weights import fold

# Those whose residual sums take nothing but a matrix's output times a number: a norm there does not commute with Q.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite")
_READ = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "lm_head")
_WRITE = ("o_proj", "down_proj")


def checkpoint(model: nn.Module) -> None:
    fold.checkpoint(model)
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    turn = orthogonal.rotation(table.shape[1])
    table.copy_(precise.rounded(table.double() @ turn))
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in _READ:
            module.weight.copy_(precise.rounded(module.weight.double() @ turn))
        elif leaf in _WRITE:
            module.weight.copy_(precise.rounded(turn.T @ module.weight.double()))
            if module.bias is not None:
                module.bias.copy_(precise.rounded(turn.T @ module.bias.double()))
