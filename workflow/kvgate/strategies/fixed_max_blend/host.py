"""Host half of the fixed buffers: the graph writes this step's slot itself, the host feeds the buffer back."""

from typing import Dict, Mapping, Tuple

import numpy as np

from kvgate import contract as c
from kvgate.strategies import host


class Host(host.Host):
    gives_back = True

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
        self, outputs: Mapping[str, host.Array], views: Dict[str, host.Array]
    ) -> Tuple[Dict[str, host.Array], float]:
        taken = {name: x[self.length].copy() for name, x in views.items()}
        for name, entry in taken.items():  # what should come back: as fed, plus this step's slot
            self.views[name][self.length] = entry
        disturbed = host.relative_change(views, self.views)
        for name, x in views.items():
            self.views[name][...] = x
        return taken, disturbed
