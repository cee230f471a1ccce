"""Host half of recompute: no cache; every step reads the whole prefix again. The baseline of cache on and off."""

from typing import Mapping, Sequence

import numpy as np

from kvgate import contract as c
from kvgate.strategies import host

CACHELESS = True  # runs on platform host only: a chip's graph would be as long as its context


class Host(host.Host):
    def __init__(self, contract: c.Contract, tables: Mapping[str, host.Array], mask_value: float) -> None:
        super().__init__(contract, tables, mask_value)
        self.tokens = np.zeros(contract.cache.capacity, np.int64)

    def reset(self, garbage: float = 0.0) -> None:
        super().reset(garbage)
        self.tokens[:] = min(int(garbage), self.contract.vocabulary - 1)

    def fill(self, tokens: Sequence[int], states: Mapping[str, host.Array], length: int) -> None:
        super().fill(tokens, states, length)
        self.tokens[:length] = tokens[:length]

    def _feed(self, t: c.Tensor, tokens: host.Array) -> host.Array:
        if t.role != c.IDS:
            return super()._feed(t, tokens)
        self.tokens[self.length] = tokens[0]
        return self.tokens.reshape(t.shape)

    def take(self, outputs: Mapping[str, host.Array], valid: int = 1) -> host.Step:
        """Logits [1, capacity, V]: the row of this step's position."""
        logits = outputs[self.contract.outputs[0].name][0, self.length]
        self.length += 1
        return host.Step(np.array(logits), {}, 0.0)

    def snapshot(self) -> tuple:
        return super().snapshot(), self.tokens.copy()

    def restore(self, state: tuple) -> None:
        super().restore(state[0])
        self.tokens[:] = state[1]
