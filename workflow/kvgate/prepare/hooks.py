"""Applies the hooks of weight preparations to a prepared model, and keeps account of the bases that they change."""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvgate.checkpoint import precise
from kvgate.checkpoint.seams import Step
from kvgate.prepare import heads, recipe, statistics, surgery, widened
from kvgate.prepare.choose_form import Prepared
from kvgate.prepare.preparation import (
    Matrices,
    OfAngles,
    OfHeads,
    OfMatrices,
    OfMatrix,
    Options,
    capabilities,
)
from kvgate.prepare.statistics import Statistics
from kvgate.prepare.widened import Terms, Widened

_MOVED_TOKENS = 12
_LOSS_TOKENS = 128  # of each text: a gradient keeps every product's rows, and the head's are long


class Work:
    """A prepared model while it is changed. Raises ValueError where a preparation cannot work on it."""

    def __init__(self, prepared: Prepared, texts: list[Path]) -> None:
        """texts: trace.npz of the calibration texts; needed by preparations that read statistics."""
        self.prepared, self.texts = prepared, texts
        self.spec, self.model = prepared.spec, prepared.model
        self.state: dict[str, np.ndarray] = {}
        self.sums: dict[str, int] = {}  # matrix name to the number of its terms
        self.widened: dict[str, str] = {}  # matrix name to the tensor of its signs
        self.signs: dict[str, np.ndarray] = {}
        self.kept: list[str] = []  # matrices that a step gave back as they are: they stay in float16
        self.chosen: list[dict[str, Any]] = []  # steps that make again what a search chose
        self.key: dict[int, Tensor] = {}  # layer to [Hk], what its keys were multiplied by
        self.value: dict[int, Tensor] = {}  # layer to [Hk, D, D]
        self.turned: dict[int, Tensor] = {}  # rotation to [D, D] that follows it
        self._statistics: Statistics | None = None

    def heads(self, step: OfHeads, options: Options) -> None:
        """Raises ValueError after a preparation of matrices, whose results would not follow into the other basis."""
        self._needs_recipe()
        self._before_matrices()
        measured = self._measured(step)
        for layer in self.spec.layers:
            module = self.model.get_submodule(layer.module)
            tensors = {n: t.data for n in recipe.TENSORS if (t := getattr(module, n)) is not None}
            change = step.heads(layer, tensors, measured and measured.peak.get(f"{layer.module}.qkv"), **options)
            heads.apply(layer, tensors, change)
            for name, tensor in tensors.items():
                getattr(module, name).data = tensor
            if change.key is not None:
                self.key[layer.index] = self.key.get(layer.index, torch.ones(1)) * change.key
            if change.value is not None:
                old = self.value.get(layer.index)
                self.value[layer.index] = change.value if old is None else old @ change.value
        self._statistics = None  # of what it was before

    def turn(self, step: OfAngles, options: Options) -> None:
        self._needs_recipe()
        for layer in self.spec.layers:
            if layer.late:
                raise ValueError(f"{layer.module}: got a norm of keys after their rotation, allowed: before it")
        for n, rotation in enumerate(self.spec.rotations):
            made = step.turn(len(rotation.turn), **options)
            self.turned[n] = self.turned[n] @ made if n in self.turned else made

    def linear(self, step: OfMatrix, options: Options) -> None:
        """One matrix at a time. The options `only` and `skip`, patterns of names, are taken here; `group`, a number of
        input channels, is given as rows of the matrix."""

        def one(weights: Matrices, grams: Matrices) -> dict[str, Terms]:
            rest = {k: v for k, v in options.items() if k not in ("only", "skip")}
            found = {}
            for name in _chosen(list(weights), options.get("only", ["*"]), options.get("skip", [])):
                rows = {"group": rest["group"] * self._kernel(name)} if "group" in rest else {}
                try:
                    found[name] = step.linear(name, weights[name], grams.get(name), **rest | rows)
                except ValueError as why:
                    raise ValueError(f"{name}: {why}") from None
            return found

        self._replace(step, one)

    def matrices(self, step: OfMatrices, options: Options) -> None:
        """All matrices at once, with a function that measures what changes of them cost.

        Raises ValueError after a preparation of single matrices: the model that would be measured has none of it.
        """
        self._before_matrices()

        def all_of_them(weights: Matrices, grams: Matrices) -> dict[str, Terms]:
            kernels = {name: self._kernel(name) for name in weights}
            return step.matrices(weights, grams, self._loss, kernels, **options)

        self._replace(step, all_of_them)
        signs = {name: self.signs[tensor] for name, tensor in self.widened.items()}
        self.chosen = step.steps(list(self.sums), list(self.kept), signs, options)

    def _loss(self, changes: Mapping[str, np.ndarray]) -> dict[str, float]:
        made = {name: torch.from_numpy(change) for name, change in changes.items()}
        texts = (rows[:_LOSS_TOKENS] for rows in map(self._rows, self.texts))
        return statistics.loss(self.model, self.spec, self._stepped(), texts, made)

    def _replace(self, step: object, change: Callable[[Matrices, Matrices], dict[str, Terms]]) -> None:
        measured = self._measured(step)
        self.state = self.state or dict(self._given())
        done = {*self.sums, *self.widened, *self.kept}
        weights = {n: statistics.matrix(w) for n, w in self.state.items() if n not in done and self._is_product(n, w)}
        grams = {name: gram.numpy() for name, gram in measured.gram.items()} if measured else {}
        for name, terms in change(weights, grams).items():
            if isinstance(terms, Widened):
                self._widen(name, terms)
                continue
            if terms[0] is weights[name]:
                self.kept.append(name)
            shape = self.state[name].shape
            for n, term in enumerate(terms):
                self.state[f"{name}.{n}" if n else name] = statistics.tensor(term, shape)
            if len(terms) > 1:
                self.sums[name] = len(terms)

    def _widen(self, name: str, found: Widened) -> None:
        if self.state[name].ndim == 4:
            raise ValueError(f"{name}: got a convolution, allowed: matrices whose input can be widened; `skip` it")
        signs = "signs.{}.{}".format(*found.signs.shape)  # one tensor for all matrices
        if not np.array_equal(self.signs.setdefault(signs, found.signs), found.signs):
            raise ValueError(f"{name}: got signs of another step, allowed: {signs} as they are")
        self.state[name], self.widened[name] = found.matrix, signs

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors of the graph by name, made as they are asked for."""
        yield from self.state.items() if self.state else self._given()
        for name in sorted(self.signs):
            yield name, self.signs[name]

    def _given(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in surgery.state(self.model).items():
            yield name, precise.single(tensor)

    def moved(self) -> dict[str, np.ndarray]:
        """`tokens` [T] and `logits` [T, V] of the model with the matrices as they are now, on the first text.

        What a graph is held to where a preparation moves weights on purpose: the checkpoint's own logits are not its.
        """
        for name, tensor in surgery.state(self.model).items():
            terms = (self.state[f"{name}.{n}"] for n in range(1, self.sums.get(name, 1)))
            first = self.state[name]
            if name in self.widened:
                first = widened.flat(first, self.signs[self.widened[name]])
            tensor.copy_(torch.from_numpy(sum(terms, start=first)))
        with np.load(self.texts[0]) as file:
            tokens = file["tokens"][:_MOVED_TOKENS]
        rows = self._rows(self.texts[0])[: len(tokens)]
        logits = statistics.run(self.model, self.spec, self._stepped(), rows)
        return {"tokens": tokens, "logits": precise.single(precise.rounded(logits))}

    def bases(self) -> dict[str, np.ndarray]:
        """For tables.npz: `basis.{key or value}.{layer}`, `inverse. ..` [Hk, D, D], `turned.{rotation}` [D, D].

        A cached row is the model's own row @ matrix.
        """
        found = {f"turned.{n}": precise.single(matrix) for n, matrix in self.turned.items()}
        for layer in self.spec.layers:
            key = self._key_basis(layer)
            for name, basis in (("key", key), ("value", self.value.get(layer.index))):
                if basis is not None:
                    found[f"basis.{name}.{layer.index}"] = precise.single(basis)
                    found[f"inverse.{name}.{layer.index}"] = precise.single(torch.linalg.inv(basis.double()))
        return found

    def _key_basis(self, layer: Any) -> Tensor | None:
        factor, turn = self.key.get(layer.index), self.turned.get(layer.rotation)
        if factor is None and turn is None:
            return None
        size = layer.key_size
        turn = torch.eye(size, dtype=torch.float64) if turn is None else turn
        factor = torch.ones(layer.kv_heads, dtype=torch.float64) if factor is None else factor.double()
        return factor[:, None, None] * turn

    def _before_matrices(self) -> None:
        if self.state:
            raise ValueError("got a step on matrices before it, allowed: none")

    def _needs_recipe(self) -> None:
        if self.spec.form != "recipe":
            raise ValueError(f"needs the recipe, got the plain form: {self.spec.reason}")

    def _is_product(self, name: str, tensor: np.ndarray) -> bool:
        """Whether the graph multiplies by it, as a convolution too; a norm's weight of two axes is none."""
        if tensor.ndim not in (2, 4) or name.rpartition(".")[2] not in ("qkv", "gate", "out", "weight"):
            return False
        return not any(name.startswith(f"{norm.module}.") for norm in self.spec.norms)

    def _kernel(self, name: str) -> int:
        """Rows of the matrix that are one input channel: a convolution's positions. The toolkit groups channels."""
        return self.state[name].shape[3] if self.state[name].ndim == 4 else 1

    def _measured(self, step: object) -> Statistics | None:
        if not capabilities(step).STATISTICS:
            return None
        if not self.texts:
            raise ValueError("reads calibration texts, got none: its entry lacks `calibrate: true`")
        if self._statistics is None:
            self._statistics = statistics.collect(self.model, self.spec, self._stepped(), map(self._rows, self.texts))
        return self._statistics

    def _stepped(self) -> Step:
        """A step of our own that the model's modules read."""
        again = Step()
        for part in (*self.spec.layers, *self.spec.mixers, *self.spec.rotations):
            self.model.get_submodule(part.module).step = again  # type: ignore[assignment]
        return again

    def _rows(self, path: Path) -> Tensor:
        with np.load(path) as file:
            rows = self.prepared.embedding[torch.from_numpy(file["tokens"])]
        positions = self.prepared.positions
        return rows if positions is None else rows + positions[: len(rows)]


def _chosen(names: list[str], only: list[str], skip: list[str]) -> list[str]:
    """Names that fit a pattern of `only` and none of `skip`. Raises ValueError on a pattern that fits nothing."""
    for pattern in (*only, *skip):
        if not any(fnmatch(name, pattern) for name in names):
            raise ValueError(f"pattern: got {pattern!r}, which fits none of {len(names)} matrices, e.g. {names[:1]}")
    fitting = [name for name in names if any(fnmatch(name, x) for x in only)]
    return [name for name in fitting if not any(fnmatch(name, x) for x in skip)]
