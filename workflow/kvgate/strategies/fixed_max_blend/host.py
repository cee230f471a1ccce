"""Host half of the fixed buffers: the graph writes this step's slot itself, the host feeds the buffer back."""

from typing import List, Mapping, Tuple

import numpy as np

from kvgate import contract as c
from kvgate.strategies import host


class Host(host.Host):
    def columns(self) -> host.Array:
        """The buffer's slots; this step's is among them."""
        seen = np.arange(self.contract.cache.capacity)
        seen[self.length + 1 :] = -1
        return seen

    def extra(self, tensor: c.Tensor) -> host.Array:
        if tensor.role == c.WRITE:
            return (np.arange(self.contract.cache.capacity) == self.length).astype(tensor.dtype).reshape(tensor.shape)
        if tensor.role == c.SLOT:
            return np.full(tensor.shape, self.length, tensor.dtype)
        return super().extra(tensor)

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: List[Tuple[host.Array, host.Array]]
    ) -> Tuple[List[Tuple[host.Array, host.Array]], float]:
        taken = [(k[self.length].copy(), v[self.length].copy()) for k, v in views]
        for (key, value), (k, v) in zip(self.views, taken):  # what should come back: as fed, plus this step's slot
            key[self.length], value[self.length] = k, v
        disturbed = host.relative_change(views, self.views)
        for mine, theirs in zip(self.views, views):
            mine[0][...], mine[1][...] = theirs
        return taken, disturbed
