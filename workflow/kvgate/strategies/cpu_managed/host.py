"""Host half of cpu_managed: the graph returns this step's K and V (the delta), the host writes them at their slots."""

from typing import Dict, Mapping, Tuple

import numpy as np

from kvgate.strategies import host


class Host(host.Host):
    def columns(self) -> host.Array:
        """The history's slots, then the step's own tokens."""
        history, own = np.arange(self.contract.cache.capacity), np.arange(self.contract.tokens)
        history[self.length :] = -1
        return np.concatenate([history, np.where(own < self.count, self.length + own, -1)])

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: Dict[str, host.Array], valid: int
    ) -> Tuple[Dict[str, host.Array], float]:
        own = slice(-self.contract.tokens, None)
        taken = {name: x[own][:valid].copy() for name, x in views.items()}
        for name, entries in taken.items():
            self.views[name][self.length : self.length + valid] = entries
        return taken, 0.0
