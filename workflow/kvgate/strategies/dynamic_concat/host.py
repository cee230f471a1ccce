"""Host half of dynamic_concat: the graph returns history + 1 slots, whose last is this step's; shapes are static."""

from typing import Dict, Mapping, Tuple

from kvgate.strategies import host
from kvgate.strategies.cpu_managed import host as cpu_managed


class Host(cpu_managed.Host):
    gives_back = True

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: Dict[str, host.Array]
    ) -> Tuple[Dict[str, host.Array], float]:
        """Take the present over: its history as returned, its last slot into the next free one."""
        returned = {name: x[:-1] for name, x in views.items()}
        disturbed = host.relative_change(returned, self.views)
        for name, x in returned.items():
            self.views[name][...] = x
        return super().take_cache(outputs, views)[0], disturbed
