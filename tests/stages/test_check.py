"""check: a graph that is the model passes; a reference that differs in one value blocks the row before any build."""

from dataclasses import replace

import families
import graphs
import numpy as np
import pytest
from kvgate.compiler import in_turn, joined
from kvgate.jobs import graph_files, record
from kvgate.jobs.job import Job
from kvgate.observe import observe
from kvgate.stages import check

PROGRAMS = {"text": {"kind": "text", "histories": ["isolated", "forced"]}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = graphs.Model.of(tmp_path_factory.mktemp("llama"), "llama")
    return model, model.export("cpu_managed"), model.text(8)


def job(llama, trace, programs=PROGRAMS) -> Job:
    model, graph, _ = llama
    folder = model.results / "traces"
    folder.mkdir(exist_ok=True)
    trace.save(str(folder / "trace.npz"))
    record.write(folder / "trace.json", {"status": "ok", "files": {"trace.npz": record.sha256(folder / "trace.npz")}})
    inputs = {"export": graph.folder / "graph.json", "trace.text": folder / "trace.json"}
    names = {"model": "llama", "weights": "plain", "strategy": "s", "part": "decode"}
    made = Job("check", names, {"programs": programs, "isolated": 4, "mask": -1e4}, inputs, model.results)
    made.folder.mkdir(parents=True, exist_ok=True)
    return made


def test_the_graph_is_the_model(llama):
    made = job(llama, llama[2])
    body = check.run(made)
    assert body["programs"]["text"]["kv_l2"] < 1e-5 and body["programs"]["text"]["steps"] == 4 + 8
    assert body["files"] == {"observations/text.npz": record.sha256(made.folder / "observations/text.npz")}


def test_float16_has_its_own_limit_and_it_is_above_float32s_error(llama):
    """An ideal float16 run is off by about float16's rounding, and leaves nothing beside the record."""
    made = job(llama, llama[2])
    limit = check.run(made)["float16"]
    assert 1e-4 < limit["kv_l2"] < 2e-3 and 1e-4 < limit["logits_l2"] < 2e-3
    assert not (made.folder / "ideal").exists()


def test_in_pieces_it_is_what_the_whole_graph_is_to_the_byte(llama, monkeypatch):
    """The observations and the record, with no two sessions of pieces at once."""
    model, whole, trace = llama
    cut = model.export("cpu_managed", layers=1)
    chat = families.generation(model.checkpoint, trace.tokens[:3].tolist(), 5)
    programs = {"text": {"kind": "chat", "histories": ["isolated", "forced", "free"]}}
    one, two = (check.run(job((model, x, trace), chat, programs)) for x in (whole, cut))
    assert one == two

    said = []

    class Counted(in_turn.Engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            said.append("opened")

        def __del__(self):
            said.append("closed")

    monkeypatch.setattr(in_turn, "Engine", Counted)
    check.run(job((model, cut, trace), chat, programs))
    assert said == ["opened", "closed"] * 6  # 3 pieces in float32, and 3 of the float16 run


def test_after_its_first_other_token_the_whole_graph_speaks(llama):
    """A near tie: what the pieces would say after it nobody ran in pieces."""
    model, _, trace = llama
    cut = model.export("cpu_managed", layers=1)
    made = job((model, cut, trace), replace(trace, prompt=3), {"text": {"kind": "chat", "histories": ["free"]}})
    contract = graph_files.contract(made)
    host = graph_files.opened(made, contract, -1e4)
    tokens = trace.tokens.copy()
    tokens[5] = (tokens[5] + 1) % contract.vocabulary
    other = replace(trace, tokens=tokens, prompt=3)
    seen = observe(cut.engine, host, other, ["forced", "free"])
    assert int(seen["free/diverged"]) >= 0
    cut_short = {k: v for k, v in seen.items() if k.startswith("forced/")} | joined.spoken(other, seen)
    found = check._joined(cut.engine, host, other, cut_short)
    assert list(found) == list(seen)
    for name, array in seen.items():
        np.testing.assert_array_equal(array, found[name], err_msg=name)


def test_one_wrong_key_is_named_by_layer_and_position(llama):
    trace = llama[2]
    states = {name: x.copy() for name, x in trace.states.items()}
    states["layers.1.key"][5] *= 1.001
    with pytest.raises(record.Blocked, match=r"the graph differs from the model: .*kv_l2.* layer 1 key, position 5"):
        check.run(job(llama, replace(trace, states=states)))


def test_a_wrong_token_is_found(llama):
    trace = llama[2]
    assert trace.logits is not None
    logits = trace.logits.copy()
    logits[3] = np.roll(logits[3], 1)
    with pytest.raises(record.Blocked, match="the graph differs from the model") as why:
        check.run(job(llama, replace(trace, logits=logits)))
    assert {x["gate"] for x in why.value.findings if "gate" in x} >= {"logits_l2", "top1"}


CHAT = {"text": {"kind": "chat", "histories": ["forced", "free"]}}


def test_a_prompt_longer_than_the_cache_is_refused(llama):
    trace = families.generation(llama[0].checkpoint, llama[0].text(9).tokens.tolist(), 3)
    with pytest.raises(record.Blocked, match="program text: got a prompt of 9 tokens, the strategy holds 8"):
        check.run(job(llama, trace, CHAT))


def test_a_prompt_that_fills_the_cache_has_one_token(llama):
    """As a bundle answers it: the last slot's logits."""
    trace = families.generation(llama[0].checkpoint, llama[0].text(8).tokens.tolist(), 3)
    made = job(llama, trace, CHAT)
    facts = check.run(made)["programs"]["text"]
    assert (facts["steps"], facts["top1"]) == (8, 8)
    seen = dict(np.load(made.folder / "observations/text.npz"))
    assert seen["free/tokens"].tolist() == [trace.tokens[8]] and seen["free/diverged"] == -1
    assert trace.logits is not None
    logits = trace.logits.copy()
    tokens = np.where(np.arange(11) == 8, (trace.tokens + 1) % 97, trace.tokens)
    with pytest.raises(record.Blocked, match="the graph differs from the model"):
        check.run(job(llama, replace(trace, tokens=tokens, logits=logits), CHAT))
