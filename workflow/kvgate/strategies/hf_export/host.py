"""Host half of hf_export: the present is taken over as it comes, padding on the left, with transformers' 0/1 mask.

Valid slots stand at the end of the history, because transformers counts a sliding window from the last column: with
padding between history and own token, sliding layers would see too little (mistral, phi3, gemma3: tried).
"""

from typing import List, Mapping, Sequence, Tuple

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

    def fill(
        self, tokens: Sequence[int], keys: Sequence[host.Array], values: Sequence[host.Array], length: int
    ) -> None:
        super().fill(tokens, [], [], length)
        first = self.contract.cache.capacity - length
        for (key, value), k, v in zip(self.views, keys, values):
            repeats = key.shape[1] // k.shape[1]  # falcon caches each KV head g times
            key[first:] = k[:length].repeat(repeats, axis=1)
            value[first:] = v[:length].repeat(repeats, axis=1)

    def take_cache(
        self, outputs: Mapping[str, host.Array], views: List[Tuple[host.Array, host.Array]]
    ) -> Tuple[List[Tuple[host.Array, host.Array]], float]:
        """Every slot moves one to the left: the first, empty one goes, this step's comes at the end."""
        disturbed = host.relative_change([(k[:-1], v[:-1]) for k, v in views], self.views)
        for mine, theirs in zip(self.views, views):
            mine[0][...], mine[1][...] = theirs[0][1:], theirs[1][1:]
        groups = [k.shape[1] // spec.kv_heads for (k, _), spec in zip(views, self.contract.layers)]
        return [(k[-1, ::g].copy(), v[-1, ::g].copy()) for (k, v), g in zip(views, groups)], disturbed
