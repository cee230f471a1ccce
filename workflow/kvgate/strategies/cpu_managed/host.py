"""Host half of cpu_managed: the graph returns this step's K and V (the delta), the host writes them at their slot."""

from typing import Dict, Mapping, Tuple

import numpy as np

from kvgate.strategies import host


class Host(host.Host):
    def columns(self) -> host.Array:
        """The history's slots, then the token itself."""
        seen = np.arange(self.contract.cache.capacity + 1)
        seen[self.length :] = -1
        seen[-1] = self.length
        return seen

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: Dict[str, host.Array]
    ) -> Tuple[Dict[str, host.Array], float]:
        taken = {name: x[-1].copy() for name, x in views.items()}
        for name, entry in taken.items():
            self.views[name][self.length] = entry
        return taken, 0.0
