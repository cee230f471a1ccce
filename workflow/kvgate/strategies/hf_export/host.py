"""Host half of hf_export: as dynamic_concat, with the 0/1 attention mask that transformers' own export reads."""

from kvgate import contract as c
from kvgate.strategies import host
from kvgate.strategies.dynamic_concat import host as dynamic_concat


class Host(dynamic_concat.Host):
    def extra(self, tensor: c.Tensor) -> host.Array:
        if tensor.role == c.ATTENTION_MASK:
            return (self.columns() >= 0).astype(tensor.dtype).reshape(tensor.shape)
        return super().extra(tensor)
