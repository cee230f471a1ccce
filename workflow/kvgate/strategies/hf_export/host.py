"""Host half of hf_export: the present is taken over as it comes, padding on the left, with transformers' 0/1 mask.

Valid slots stand at the end of the history, because transformers counts a sliding window from the last column: with
padding between history and own token, sliding layers would see too little (mistral, phi3, gemma3: tried).
"""

from typing import Dict, Mapping, Sequence, Tuple

import numpy as np

from kvgate import contract as c
from kvgate.strategies import host


class Host(host.Host):
    def columns(self) -> host.Array:
        """The history, empty slots first, then the token itself."""
        positions = np.arange(self.contract.cache.capacity + 1) - self.contract.cache.capacity + self.length
        return np.maximum(positions, -1)

    def extra(self, tensor: c.Tensor) -> host.Array:
        if tensor.role == c.ATTENTION_MASK:
            return (self.columns() >= 0).astype(tensor.dtype).reshape(tensor.shape)
        return super().extra(tensor)

    def fill(self, tokens: Sequence[int], states: Mapping[str, host.Array], length: int) -> None:
        self.reset()
        self._check_room(length - 1)
        self.length = length
        for name, mine in self.views.items():
            mine[self.contract.cache.capacity - length :] = states[name][:length].repeat(self._repeats(name), axis=1)

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: Dict[str, host.Array], valid: int
    ) -> Tuple[Dict[str, host.Array], float]:
        """Every slot moves one to the left: the first, empty one goes, this step's comes at the end."""
        disturbed = host.relative_change({name: x[:-1] for name, x in views.items()}, self.views)
        for name, x in views.items():
            self.views[name][...] = x[1:]
        return {name: x[-1:, :: self._repeats(name)].copy() for name, x in views.items()}, disturbed

    def _repeats(self, name: str) -> int:
        """How often the graph's tensor has each KV head: falcon caches each g times."""
        return int(self.views[name].shape[1] // self.states[name].entry[0])
