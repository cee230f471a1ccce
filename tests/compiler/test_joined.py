"""A row in pieces as a whole: what it said, and what its pieces must agree on."""

import numpy as np
import pytest
import synthetic
from kvgate.compiler import joined
from kvgate.compiler.piece import Piece
from kvgate.contract import HIDDEN, Tensor
from kvgate.observe import Trace

OF = synthetic.trace()


def forced(change=None) -> dict[str, np.ndarray]:
    """The forced history of a perfect row; `change` edits its logits [n, V]."""
    seen = {k: v for k, v in synthetic.observation(OF).items() if k.startswith("forced/")}
    if change:
        change(seen["forced/logits"])
    return seen


def test_a_row_that_follows_the_reference_said_what_it_said():
    found = joined.spoken(OF, forced())
    assert found["free/diverged"] == -1
    assert found["free/tokens"].tolist() == OF.tokens[OF.prompt :].tolist()


def test_it_said_all_up_to_its_first_other_token():
    position, other = OF.prompt + 3, (int(OF.tokens[OF.prompt + 4]) + 1) % synthetic.VOCABULARY

    def change(logits):
        logits[position, other] = 1e3

    found = joined.spoken(OF, forced(change))
    assert found["free/diverged"] == 4
    assert found["free/tokens"].tolist() == [*OF.tokens[OF.prompt : position + 1], other]


def test_a_token_of_the_prompt_is_nothing_that_it_said():
    def change(logits):
        logits[0, (int(OF.tokens[1]) + 1) % synthetic.VOCABULARY] = 1e3

    assert joined.spoken(OF, forced(change))["free/diverged"] == -1


def test_pieces_ran_the_same_steps_or_are_refused():
    one, two = np.arange(3), np.array([0, 1, 3])
    assert joined._together("forced/positions", one, one) is one
    with pytest.raises(ValueError, match="forced/positions differs between pieces"):
        joined._together("forced/positions", one, two)
    assert joined._together("forced/disturbed", one, two).tolist() == [0, 1, 3]
    assert joined._together("forced/logits", np.ones((2, 3)), np.zeros((2, 4))).shape == (2, 7)


class Echo:
    """Gives the stream that it got, and one more."""

    def step(self, feeds):
        return {"hidden.out": feeds["hidden"] + 1}


def test_a_piece_is_fed_the_streams_in_the_order_of_the_steps(tmp_path):
    streams = {f"{h}/{HIDDEN}": np.full((n, 4), n, np.float32) for h, n in (("forced", 3), ("isolated", 2))}
    np.savez(tmp_path / "seen.npz", **streams)
    stream = Tensor("hidden", HIDDEN, (1, 1, 4))
    contract = synthetic.contract(inputs=(stream,), outputs=(Tensor("hidden.out", HIDDEN, (1, 1, 4)),))
    piece = Piece(Echo(), contract, str(tmp_path / "seen.npz"))
    got = [float(piece.step({"hidden": np.zeros((1, 1, 4), np.float32)})["hidden.out"][0, 0, 0]) for _ in range(5)]
    assert got == [3, 3, 4, 4, 4]  # the two isolated steps first
    found = piece.observed({"isolated/positions": np.arange(2), "forced/positions": np.arange(3)})
    assert found[f"isolated/{HIDDEN}"].shape == (2, 4) and found[f"forced/{HIDDEN}"][0, 0] == 4
    with pytest.raises(IndexError):  # a step more than the piece before has run
        piece.step({"hidden": np.zeros((1, 1, 4), np.float32)})


def test_a_trace_without_generated_tokens_says_nothing_else():
    text = Trace(OF.tokens, len(OF.tokens), False, (), OF.states, OF.logits)
    assert joined.spoken(text, forced())["free/tokens"].tolist() == []
