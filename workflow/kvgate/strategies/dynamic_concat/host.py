"""Host half of dynamic_concat: the graph returns history + 1 slots, whose last is this step's; shapes are static."""

from typing import List, Mapping, Tuple

from kvgate.strategies import host
from kvgate.strategies.cpu_managed import host as cpu_managed


class Host(cpu_managed.Host):
    def take_cache(
        self, outputs: Mapping[str, host.Array], views: List[Tuple[host.Array, host.Array]]
    ) -> Tuple[List[Tuple[host.Array, host.Array]], float]:
        """Take the present over: its history as returned, its last slot into the next free one."""
        returned = [(k[:-1], v[:-1]) for k, v in views]
        disturbed = host.relative_change(returned, self.views)
        for mine, theirs in zip(self.views, returned):
            mine[0][...], mine[1][...] = theirs
        return super().take_cache(outputs, views)[0], disturbed
