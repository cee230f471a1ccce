"""Host half of cpu_managed: the graph returns this step's K and V (the delta), the host writes them at their slot."""

from typing import List, Mapping, Tuple

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
        self, outputs: Mapping[str, host.Array], views: List[Tuple[host.Array, host.Array]]
    ) -> Tuple[List[Tuple[host.Array, host.Array]], float]:
        taken = [(k[-1].copy(), v[-1].copy()) for k, v in views]
        for (key, value), (k, v) in zip(self.views, taken):
            key[self.length] = k
            value[self.length] = v
        return taken, 0.0
