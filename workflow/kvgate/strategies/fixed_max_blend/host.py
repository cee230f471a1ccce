"""Host half of the fixed buffers: the graph writes this step's slots itself, the host feeds the buffer back."""

from typing import Dict, Mapping, Tuple

import numpy as np

from kvgate import contract as c
from kvgate.strategies import host


class Host(host.Host):
    gives_back = True

    def columns(self) -> host.Array:
        """The buffer's slots; this step's are among them."""
        seen = np.arange(self.contract.cache.capacity)
        seen[self.length + self.count :] = -1
        return seen

    def extra(self, tensor: c.Tensor) -> host.Array:
        slots = np.arange(self.contract.cache.capacity)
        if tensor.role == c.WRITE:
            own = (slots >= self.length) & (slots < self.length + self.count)
            return own.astype(tensor.dtype).reshape(tensor.shape)
        if tensor.role == c.PLACE:
            place = (self.positions()[:, None] == slots).astype(tensor.dtype)
            place[self.count :] = 0
            return np.ascontiguousarray(place if self.contract.cache.layout == "channels" else place.T)
        if tensor.role == c.SLOT:
            return self.positions().astype(tensor.dtype)
        return super().extra(tensor)

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: Dict[str, host.Array], valid: int
    ) -> Tuple[Dict[str, host.Array], float]:
        own = slice(self.length, self.length + valid)
        taken = {name: x[own].copy() for name, x in views.items()}
        for name, entries in taken.items():  # what should come back: as fed, plus this step's slots
            self.views[name][own] = entries
        disturbed = host.relative_change(views, self.views)
        for name, x in views.items():
            self.views[name][...] = x
        return taken, disturbed
