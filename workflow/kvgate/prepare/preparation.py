"""What a preparation of weights is: a module of the room `weights` with some of these hooks, and constants.

Each hook leaves the function as it is in float32, unless the module has MOVES. What it takes beyond the given arguments
are its options: keyword arguments with defaults, set by an entry of weights.yaml and known by their names while
planning.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Concatenate, Protocol

import numpy as np
from torch import Tensor, nn

from kvgate.prepare.heads import Change
from kvgate.prepare.spec import Layer
from kvgate.prepare.widened import Terms

Options = Mapping[str, Any]
Matrices = dict[str, np.ndarray]  # [in, out] by name
Loss = Callable[[Matrices], Mapping[str, float]]  # what changes of single matrices cost, by name, in nats a token


class OfModel(Protocol):
    @property
    def checkpoint(self) -> Callable[Concatenate[nn.Module, ...], None]:
        """(model, **options): changes the loaded model in place, before it is measured."""


class OfHeads(Protocol):
    @property
    def heads(self) -> Callable[Concatenate[Layer, dict[str, Tensor], Tensor | None, ...], Change]:
        """(layer, tensors, peak, **options): gives a layer's K and V another basis.

        tensors: the layer's own (recipe.TENSORS); peak: [columns] the largest of its joint product, where STATISTICS.
        """


class OfAngles(Protocol):
    @property
    def turn(self) -> Callable[Concatenate[int, ...], Tensor]:
        """(D, **options): [D, D], follows every rotary embedding, so K is cached in that basis."""


class OfMatrix(Protocol):
    @property
    def linear(self) -> Callable[Concatenate[str, np.ndarray, np.ndarray | None, ...], Terms]:
        """(name, weight, gram, **options): the matrices [in, out] whose products the graph adds up instead of the
        weight's, or one whose input is widened. gram: [in, in], where STATISTICS and the matrix was seen."""


class OfMatrices(Protocol):
    @property
    def matrices(self) -> Callable[Concatenate[Matrices, Matrices, Loss, dict[str, int], ...], dict[str, Terms]]:
        """(weights, grams, loss, kernels, **options): as `linear`, of all matrices at once, by name.

        kernels: rows of a matrix that are one input channel.
        """

    @property
    def steps(
        self,
    ) -> Callable[[Iterable[str], Iterable[str], Mapping[str, np.ndarray], Options], list[dict[str, Any]]]:
        """(sums, kept, signs, options): the steps of weights.yaml that make its result again.

        sums, kept: names of the matrices that became sums, or stayed; signs: of those whose input is widened.
        """


HOOKS: dict[str, type] = {
    "checkpoint": OfModel,
    "heads": OfHeads,
    "turn": OfAngles,
    "linear": OfMatrix,
    "matrices": OfMatrices,
}


@dataclass(frozen=True)
class Capabilities:
    """A module's constants of these names; what it does not set is the default."""

    FAMILIES: tuple[str, ...] | None = None  # model types that `checkpoint` knows; None: any
    DTYPES: tuple[str, ...] | None = None  # quantized dtypes that it makes sense for; None: any
    STATISTICS: bool = False  # reads `peak` or `gram`, so its entry has calibration texts
    MOVES: bool = False  # changes the function on purpose: the graph is held to the moved weights' own logits
    DISABLE: tuple[str, ...] = ()  # rules of the toolkit that its graph needs off
    HYBRID: tuple[str, ...] = ()  # patterns that the quant's `hybrid` must have
    COMPENSATES: bool = False  # the graph's residual stream keeps what float16 loses (export/residual.py)


def capabilities(module: object) -> Capabilities:
    found: dict[str, Any] = {x.name: getattr(module, x.name) for x in fields(Capabilities) if hasattr(module, x.name)}
    return Capabilities(**found)
