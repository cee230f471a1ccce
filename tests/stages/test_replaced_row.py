"""A row of a model with replaced states through the real stages: check, verdict, reason, table, bundle, generation."""

import importlib

import numpy as np
import pytest
import tinyrow
import torch
from graphs import STRATEGIES, Model
from kvgate.board.ort import Engine
from kvgate.checkpoint import reference
from kvgate.contract import Contract
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.observe import Trace
from kvgate.report import columns
from kvgate.serving.context import Context, Options, Run
from kvgate.stages import accuracy

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        **{"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def rows(request, tmp_path_factory) -> tinyrow.Rows:
    config = {"model_type": request.param, "num_hidden_layers": 3, **SIZES, **MODELS[request.param]}
    return tinyrow.Rows(tmp_path_factory.mktemp(request.param), config=config)


def transformers_own(rows: tinyrow.Rows, prompt: list[int], count: int) -> list[int]:
    model = reference.load(rows.results / "models" / "tiny" / "checkpoint")
    made = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return made[0, len(prompt) :].tolist()


def test_the_row_passes_with_a_gate_on_its_states(rows):
    verdict = record.read(rows.judged(tinyrow.CHIP))
    assert verdict["verdict"] == "pass" and "state_l2" in {x["name"] for x in verdict["gates"]}
    figures = verdict["figures"]
    assert 0 < figures["state_worst"]["value"] < 1e-4 and figures["state_worst"]["layer"] in (0, 1)
    assert 0 < figures["float16"]["state_l2"] < 1e-2 and 0 < figures["float16"]["kv_l2"] < 1e-2
    checked = record.read(rows.job("check", {}, []).record)
    assert all(0 < x["state_l2"] < 1e-4 for x in checked["programs"].values())


def test_the_table_has_a_column_for_them_where_there_are_any(rows):
    body = rows.tabulated(rows.judged(tinyrow.CHIP))
    (row,) = body["rows"]
    assert 0 < float(row["state_l2_worst"]) < 1e-4 and row["state_worst"].startswith("layers.")
    assert "state worst" in body["announce"]
    none = record.read(rows.judged(tinyrow.CHIP))
    none["figures"] = {k: v for k, v in none["figures"].items() if not k.startswith("state_")} | {"float16": None}
    assert not any(x.startswith("state_") for x in columns.names([none])) and "kv_l2_worst" in columns.names([none])


def test_a_state_that_is_off_is_the_reason(rows):
    checked = rows.job("check", {}, []).record
    path, body = checked.parent / "observations" / "full.npz", record.read(checked)
    right = path.read_bytes()
    with np.load(path) as file:
        seen = dict(file)
    kind = "recurrent" if "forced/layers.1.recurrent" in seen else "convolution"
    wrong = seen[f"forced/layers.1.{kind}"].astype(np.float32)
    wrong[5:] *= 1.5
    try:
        with path.open("wb") as file:
            np.savez(file, **(seen | {f"forced/layers.1.{kind}": wrong}))
        record.write(checked, body | {"files": body["files"] | {"observations/full.npz": record.sha256(path)}})
        verdict = record.read(rows.judged(tinyrow.CHIP))
        assert verdict["verdict"] == "fail" and verdict["figures"]["state_worst"]["state"] == f"layers.1.{kind}"
        assert f"state 50.00 %, allowed 1.00 % at layer 1 {kind}, position 5, forced run of full" in verdict["reason"]
    finally:
        path.write_bytes(right)
        record.write(checked, body)


def test_the_bundle_generates_transformers_own_tokens(rows):
    """In a process of its own, token for token what `generate` makes of the prompt."""
    bundle = rows.bundle(tinyrow.HOST)
    for prompt in (rows.prompt, rows.prompt[:3]):
        wanted = transformers_own(rows, prompt, 12)
        ran = tinyrow.generate(bundle, "--ids", ",".join(map(str, prompt)), "--max-tokens", "12")
        assert ran.returncode == 0, ran.stderr
        assert [int(x) for x in ran.stdout.replace(",", " ").split()] == wanted


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_context_starts_over_where_a_prompt_does_not_go_on(rows, strategy):
    """The same prompt, another one and the first again: a replaced state cannot be taken back to where they part."""
    folder = Model(rows.results, "tiny").export(strategy, capacity=tinyrow.CAPACITY).folder
    contract = Contract.from_json((folder / "contract.json").read_text())
    half = importlib.import_module(f"kvgate.strategies.{strategy}.host")
    engine = Engine({}, folder, contract)
    engine.open(lambda phase: None)
    context = Context(engine, half.Host(contract, dict(np.load(folder / "host.npz")), -1e4), ())
    other = [*rows.prompt[:-2], 7, 8]
    wanted = {tuple(x): transformers_own(rows, x, 6) for x in (rows.prompt, other)}
    for prompt in (rows.prompt, rows.prompt, other, rows.prompt):
        run = Run(len(prompt))
        assert list(context.generate(prompt, Options(max_tokens=6), run)) == wanted[tuple(prompt)]
        assert run.reused == 0


def test_only_steps_that_the_reference_can_feed_are_analysed(tmp_path):
    """Of a forced history alone: the worst step is none whose states are not known before it."""
    at = np.array([0, 4, 5, 9])
    trace = Trace(np.zeros(10, np.int64), 10, False, (), {}, None, {"layers.0.recurrent": np.zeros((4, 1))}, at)
    trace.save(str(tmp_path / "trace.npz"))
    record.write(tmp_path / "trace.json", {"files": {"trace.npz": record.sha256(tmp_path / "trace.npz")}})
    (tmp_path / "a").mkdir()
    kv = np.linspace(0.1, 1.0, 10)[:, None]
    np.savez(tmp_path / "a" / "metrics.npz", **{"forced/kv": kv, "forced/positions": np.arange(10)})
    files = {"a/metrics.npz": record.sha256(tmp_path / "a" / "metrics.npz")}
    record.write(tmp_path / "metrics.json", {"files": files})
    inputs = {"verify": tmp_path / "metrics.json", "trace.a": tmp_path / "trace.json"}
    job = Job("accuracy", {}, {"programs": {"a": {}}}, inputs, tmp_path)
    assert accuracy._state(job).position == 9
    assert accuracy._state(job, replaced=True).position == 5
