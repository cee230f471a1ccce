"""Host half of dynamic_concat: the graph returns history + T slots, whose last are this step's; shapes are static."""

from typing import Dict, Mapping, Tuple

from kvgate.strategies import host
from kvgate.strategies.cpu_managed import host as cpu_managed


class Host(cpu_managed.Host):
    gives_back = True

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: Dict[str, host.Array], valid: int
    ) -> Tuple[Dict[str, host.Array], float]:
        """Take the present over: its history as returned, its last slots into the next free ones."""
        returned = {name: x[: -self.contract.tokens] for name, x in views.items()}
        disturbed = host.relative_change(returned, self.views)
        for name, x in returned.items():
            self.views[name][...] = x
        return super().take_cache(outputs, views, valid)[0], disturbed
