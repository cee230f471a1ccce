"""A row's artifacts in one folder: those that do not belong together are refused by name, with one line."""

import math
from dataclasses import replace

import pytest
import rig
from graphs import Model
from kvgate import contract as c
from kvgate.board import parts
from kvgate.export import pieces as cutting
from kvgate.jobs import graph_files


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """The contracts of a decoder, of its pieces with a head in three, and of its prefill part."""
    model = Model.of(tmp_path_factory.mktemp("row"), "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "COLUMNS", 40)
        whole = model.export("cpu_managed", layers=1)
    pieces = [
        c.Contract.from_json((whole.folder / graph_files.piece_names(x)[1]).read_text()) for x in whole.record["pieces"]
    ]
    return whole.contract, pieces, model.prefill("cpu_managed").contract


def grown(contract: c.Contract, name: str) -> c.Contract:
    """With one slot more in a state and in the tensor that holds it."""
    states = tuple(replace(x, shape=(9, *x.shape[1:])) if x.name == name else x for x in contract.states)
    return replace(contract, states=states)


def test_a_real_row_belongs_together(row):
    whole, pieces, prefill = row
    assert [x.part for x in pieces] == ["layers.0-0", "layers.1-1", "head.0", "head.1", "head.2"]
    parts.hold_pieces(whole, pieces)
    parts.hold_pieces(whole, [])
    parts.hold_part(whole, prefill)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ((1, 0, 2, 3, 4), "pieces: got layers.1-1 as number 1, allowed: layers.0-0"),
        ((0, 1, 3, 2, 4), "pieces: got head.1 as number 3, allowed: head.0"),
        ((0, 1, 2, 4), "pieces: logits: got 65 columns, allowed: 97"),
        ((0, 1), "pieces: logits: got 0 columns, allowed: 97"),
        ((0, 2, 3, 4), "pieces: state layers.1.key: got no piece that returns it, allowed: one"),
        ((1, 2, 3, 4), "layers.1-1: got a stream to read as number 1"),
        ((0, 0, 1, 2, 3, 4), "layers.0-0: got no stream to read as number 2"),
        ((0, 1, 1, 2, 3, 4), "layers.1-1: got state layers.1.key, allowed: what the whole returns, once"),
    ],
)
def test_pieces_that_are_not_the_whole(row, order, said):
    whole, pieces, _ = row
    with pytest.raises(parts.Unfit) as why:
        parts.hold_pieces(whole, [pieces[n] for n in order])
    assert str(why.value) == said


def test_a_state_of_another_size_is_named(row):
    whole, pieces, prefill = row
    with pytest.raises(parts.Unfit, match=r"layers.1-1: state layers.1.value: got \[9, .*\], allowed: \[8, "):
        parts.hold_pieces(whole, [pieces[0], grown(pieces[1], "layers.1.value"), *pieces[2:]])
    with pytest.raises(parts.Unfit, match=r"prefill: state layers.0.key: got \[9, .*\], allowed: \[8, "):
        parts.hold_part(whole, grown(prefill, "layers.0.key"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "fixed_max_blend"}, "prefill: strategy: got 'fixed_max_blend', allowed: 'cpu_managed'"),
        ({"vocabulary": 5}, "prefill: vocabulary: got 5, allowed: 97"),
        ({"states": ()}, "prefill: layers.0.key: got no such state, allowed: all of decode's"),
    ],
)
def test_a_part_of_another_row(row, change, said):
    whole, _, prefill = row
    with pytest.raises(parts.Unfit) as why:
        parts.hold_part(whole, replace(prefill, **change))
    assert str(why.value) == said


def test_buffers_that_a_part_cannot_share(row):
    whole, _, prefill = row
    inputs = tuple(replace(t, shape=(*t.shape[:-1], 9)) if t.name == "key.0" else t for t in prefill.inputs)
    with pytest.raises(parts.Unfit, match=r"prefill: state layers.0.key: got \[.*, 1, 9\], allowed: \[.*, 1, 8\]"):
        parts.hold_part(whole, replace(prefill, inputs=inputs))


# What a job says, and what lies in its folder


@pytest.fixture
def folder(tmp_path, row):
    """The files of a job, and the job."""
    whole, pieces, prefill = row
    for place, contract in (("", whole), *((x.part, x) for x in (*pieces, prefill))):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "contract.json").write_text(contract.to_json())
    told = {x.part: {"contract_digest": x.digest, "custom_string": x.part} for x in (*pieces, prefill)}
    job = rig.job(
        contract_digest=whole.digest,
        pieces=[{"part": x.part, **told[x.part]} for x in pieces],
        parts={"prefill": told["prefill"]},
    )
    return tmp_path, job


def test_what_a_job_names_is_read(folder):
    found = parts.read(*folder)
    names = [x.folder for x in found.artifacts()]
    assert names == ["layers.0-0", "layers.1-1", "head.0", "head.1", "head.2", "prefill"]
    assert found.whole.contract.part == "decode"


def swap(folder):
    one, two, spare = (folder / x for x in ("layers.0-0", "layers.1-1", "spare"))
    for a, b in ((one, spare), (two, one), (spare, two)):
        a.rename(b)


def old(folder):
    path = folder / "prefill/contract.json"
    path.write_text(path.read_text().replace('"version":2', '"version":1'))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (swap, "layers.0-0/contract.json: got part 'layers.1-1', allowed: 'layers.0-0'"),
        (lambda x: (x / "head.1/contract.json").unlink(), "head.1/contract.json: No such file or directory"),
        (lambda x: (x / "prefill/contract.json").write_text("["), "prefill/contract.json: Expecting value"),
        (old, "prefill/contract.json: contract version: got 1, known: 2 (make the graph"),
        (
            lambda x: (x / "prefill/contract.json").write_text((x / "contract.json").read_text()),
            "prefill/contract.json: got part 'decode', allowed: 'prefill'",
        ),
    ],
)
def test_files_that_are_not_those_of_the_job(folder, damage, said):
    damage(folder[0])
    with pytest.raises(parts.Unfit) as why:
        parts.read(*folder)
    assert str(why.value).startswith(said) and "\n" not in str(why.value)


def test_a_part_of_another_digest(folder):
    folder[1]["parts"]["prefill"]["contract_digest"] = "0" * 64
    with pytest.raises(parts.Unfit, match=r"prefill/contract.json: got digest .*, allowed: 0000"):
        parts.read(*folder)


def test_an_artifact_whose_state_has_another_size_is_refused_by_the_state_s_name(row):
    artifact = parts.Artifact("prefill", row[2], {})
    count = next(math.prod(t.shape) for t in row[2].inputs if t.name == "key.0")
    same = {"inputs": [{"name": "key.0", "shape": [count // 8, 8]}], "outputs": []}  # as the artifact lays it out
    parts.hold_boundary(artifact, {"boundary": same})
    parts.hold_boundary(artifact, {})
    same["inputs"][0]["shape"] = [count // 8, 9]
    with pytest.raises(parts.Unfit) as why:
        parts.hold_boundary(artifact, {"boundary": same})
    said = f"prefill/artifact.json: state layers.0.key: got {count // 8 * 9} elements, allowed: {count}"
    assert str(why.value) == said


@pytest.mark.parametrize(
    ("left", "tokens", "size"), [(1, 8, 1), (2, 8, 1), (3, 8, 2), (9, 8, 8), (10, 8, 8), (30, 8, 8)]
)
def test_chunks(left, tokens, size):
    assert parts.chunk(left, tokens) == size
