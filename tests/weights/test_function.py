"""Every preparation keeps the fp32 function, exported by the real stages and run in ONNX Runtime."""

from importlib import import_module
from pathlib import Path
from typing import Any

import families
import graphs
import numpy as np
import pytest
from kvgate.jobs import record
from kvgate.jobs.job import Job
from kvgate.judging import metrics
from kvgate.observe import observe
from kvgate.planning import sweep
from kvgate.prepare import int4_grid
from kvgate.stages import check, export, prepare
from kvgate.weights import fold, rotate, scale
from tiny import relist

ANY = ("compensate", "vrot", "krot", "qkv", "split2")  # on every family
RECIPE = ("llama", "llama_g8", "qwen3", "olmo2", "gemma3_text", "phi", "gpt_neox", "glm4", "exaone4", "cohere")
TOKENS = 12


class Prepared:
    """A model with a preparation, by the real stages; `texts` are its calibration texts."""

    def __init__(
        self,
        root: Path,
        family: str,
        *steps: str,
        module: str = "cpu_managed",
        form: str = "recipe",
        size: families.Size = families.TINY,
        entry: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """options: of every step; entry: one of weights.yaml instead."""
        self.root, self.family = root, family
        self.model = graphs.Model.of(root, family, size)
        self.trace = self.model.text(TOKENS)
        text = self.job("trace", {"program": "c"}, {}, {}).record
        self.trace.save(str(text.with_name("trace.npz")))
        record.write(text, {"status": "ok", "files": {"trace.npz": record.sha256(text.with_name("trace.npz"))}})
        entry = entry or {"steps": [{"name": name, "options": options} for name in steps]}
        inputs = {"fetch": self.model.checkpoint / "manifest.json", "calibration.c": text}
        made = self.job("prepare", {"form": form}, {"weights": entry}, inputs)
        self.body = prepare.run(made) | {"status": "ok"}
        record.write(made.record, self.body)
        self.folder = made.folder
        strategy = {"module": module, "capacity": TOKENS, "form": "recipe", "layers": 0}
        strategy |= {"layout": "channels", "rank": 4, "packing": "apart"}
        inputs = {"fetch": inputs["fetch"], "prepare": made.record}
        exported = self.job("export", {"strategy": "s"}, {"strategy": strategy}, inputs)
        record.write(exported.record, export.run(exported) | {"status": "ok"})
        self.graph = graphs.Graph(exported.folder)
        half = import_module(f"kvgate.strategies.{module}.host")
        self.host = half.Host(self.graph.contract, self.graph.tables, -1e4)

    def job(self, stage: str, names: dict, config: dict, inputs: dict) -> Job:
        names = {"model": self.family, "weights": "w", "part": "decode", **names}
        made = Job(stage, names, config, inputs, self.root)
        made.folder.mkdir(parents=True, exist_ok=True)
        return made

    def tensor(self, name: str) -> np.ndarray:
        entry = self.body["tensors"][name]
        return np.fromfile(self.folder / "weights.bin", np.float32, np.prod(entry["shape"]), offset=entry["offset"])

    def error(self) -> float:
        """The worst L2 of logits and every K and V, isolated (filled from the trace) and with the own cache."""
        seen = observe(self.graph.engine, self.host, self.trace, ["isolated", "forced"], 5)
        errors = []
        for history in ("isolated", "forced"):
            at = seen[f"{history}/positions"]
            errors.append(metrics.l2(seen[f"{history}/logits"], self.trace.logits[at]))
            errors += [metrics.l2(seen[f"{history}/{name}"], x[at]) for name, x in self.trace.states.items()]
        return max(errors)


def named(known: tuple[str, ...]) -> list[str]:
    return [name for name, f in families.FAMILIES.items() if f.model_type in known]


CASES = [
    *(("fold", family) for family in named(fold.FAMILIES)),
    *(("rotate", family) for family in named(rotate.FAMILIES)),
    *(("scale", family) for family in named(scale.FAMILIES)),
    *((name, family) for name in ANY for family in RECIPE),
    *((name, "llama") for name in ("plain", "keep")),  # they change nothing
]
# These move weights on purpose.
MOVED = [
    *((family, "gptq", {}) for family in ("llama", "gemma3_text", "bloom")),
    *((family, "widen", {"group": 16}) for family in ("llama", "qwen3", "phi", "gpt2", "bloom")),
    ("gemma3_text", "widen", {"group": 16, "skip": ["*attn.out*"]}),
    ("llama", "mixed", {"group": 16, "share": 0.6}),
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_the_function_is_kept(tmp_path, name, family):
    made = Prepared(tmp_path, family, name)
    assert made.body["form"] == "recipe"
    assert made.error() < 1e-5


@pytest.mark.parametrize("module", graphs.STRATEGIES)
def test_all_together_in_every_strategy(tmp_path, module):
    made = Prepared(tmp_path, "llama", "rotate", "vrot", "krot", "qkv", "split2", module=module)
    assert made.error() < 1e-5
    assert set(made.body["sums"].values()) == {2}


@pytest.mark.parametrize(("family", "step", "options"), MOVED)
def test_a_graph_of_moved_weights_is_held_to_what_they_give(tmp_path, family, step, options):
    made = Prepared(tmp_path, family, step, form="plain" if family == "bloom" else "recipe", **options)
    text = made.root / "text.json"
    made.trace.save(str(text.with_name("trace.npz")))
    record.write(text, {"status": "ok", "files": {"trace.npz": record.sha256(text.with_name("trace.npz"))}})
    graph = made.graph.folder / "graph.json"
    config = {"programs": {"p": {"kind": "text", "histories": ["forced"]}}, "isolated": 4, "mask": -1e4}
    job = made.job("check", {"strategy": "s"}, config, {"export": graph, "trace.p": text})
    assert check.run(job)["programs"]["p"]["logits_l2"] > 1e-4  # not the checkpoint's any more
    with np.load(graph.with_name("moved.npz")) as file:
        arrays = dict(file)
    broken = arrays["logits"].copy()
    broken[3] = np.nan
    for logits in (arrays["logits"][::-1], broken):
        graph.with_name("moved.npz").unlink()  # at first a link to the prepared one
        np.savez(graph.with_name("moved.npz"), tokens=arrays["tokens"], logits=logits)
        relist(graph)
        with pytest.raises(record.Blocked, match="the graph differs from the model: moved weights: logits_l2 "):
            check.run(job)


def test_the_cache_really_is_in_another_basis(tmp_path):
    made = Prepared(tmp_path, "llama", "vrot", "krot", "qkv")
    made.host.fill(made.trace.tokens.tolist(), made.trace.states, TOKENS)
    for name, slots in made.host.views.items():
        assert metrics.l2(slots, made.trace.states[name]) > 0.1


def test_a_wrong_inverse_is_seen(tmp_path):
    made = Prepared(tmp_path, "llama", "vrot")
    made.host.tables = dict(made.host.tables) | {"inverse.value.1": np.eye(16, dtype=np.float32)[None].repeat(2, 0)}
    assert made.error() > 0.1


def test_a_family_that_it_does_not_know_is_blocked(tmp_path):
    with pytest.raises(record.Blocked, match="preparation rotate: got a gemma2, known: llama, "):
        Prepared(tmp_path, "gemma2", "rotate")


def test_a_group_that_does_not_divide_is_blocked(tmp_path):
    with pytest.raises(
        record.Blocked, match=r"preparation split2: .*: group: got 7, allowed: a divisor of the matrix's"
    ):
        Prepared(tmp_path, "llama", "split2", group=7)


def test_a_scale_that_is_no_power_of_two_is_blocked(tmp_path):
    with pytest.raises(record.Blocked, match=r"preparation scale: by: got 0\.03, allowed: a power of two"):
        Prepared(tmp_path, "llama", "scale", by=0.03)


@pytest.mark.parametrize("name", ["vrot", "qkv"])
def test_a_basis_after_matrices_is_blocked(tmp_path, name):
    """The matrices that were made before would not follow."""
    with pytest.raises(record.Blocked, match=f"preparation {name}: got a step on matrices before it, allowed: none"):
        Prepared(tmp_path, "llama", "split2", name)


def test_a_turn_before_the_norm_of_keys_is_blocked(tmp_path):
    """The norm's weights belong to channels, which a turn between it and the rotation would mix."""
    reason = r"krot: model\.layers\.0\.self_attn: got a norm of keys after their rotation, allowed: before it"
    with pytest.raises(record.Blocked, match=reason):
        Prepared(tmp_path, "hunyuan_v1_dense", "krot")


def test_a_turn_after_matrices_is_none_of_theirs(tmp_path):
    assert Prepared(tmp_path, "llama", "split2", "krot").error() < 1e-5


def test_an_output_projection_that_is_a_convolution_is_a_matrix_too(tmp_path):
    """Of one KV head. A group of input channels is there at all of its positions."""
    for step, family in (("split2", "gemma3_text"), ("gptq", "llama_g8")):
        made = Prepared(tmp_path / step, family, step, group=16)
        name = "model.layers.1.self_attn.out"
        width, channels, _, positions = made.body["tensors"][name]["shape"]
        assert (channels, positions) == (16, {"gemma3_text": 4, "llama_g8": 8}[family])
        first = made.tensor(name).reshape(width, -1).T
        assert np.abs(first - int4_grid.nearest(first, 16 * positions)).max() < 1e-6
        assert np.abs(first - int4_grid.nearest(first, 16)).max() > 1e-3
        assert (name in made.body["sums"]) is (step == "split2")


def test_patterns_choose_matrices(tmp_path):
    made = Prepared(tmp_path, "llama", "split2", only=["*down_proj*", "lm_head*"], skip=["*layers.0*"])
    assert set(made.body["sums"]) == {"model.layers.1.mlp.down_proj.weight", "lm_head.weight"}
    assert made.error() < 1e-5


def test_a_pattern_that_fits_nothing_is_blocked(tmp_path):
    with pytest.raises(record.Blocked, match=r"preparation split2: pattern: got '\*nope\*', which fits none of 11 "):
        Prepared(tmp_path, "llama", "split2", only=["*nope*"])


def test_a_plain_form_is_no_ground_for_a_basis(tmp_path):
    with pytest.raises(record.Blocked, match="preparation vrot: needs the recipe, got the plain form: "):
        Prepared(tmp_path, "llama", "vrot", form="plain")


def test_every_preparation_is_tested():
    """By the cases that run above: one that says so moves weights, every other one keeps the function."""
    moving = {name for name in sweep.modules("weights") if getattr(prepare.preparation(name), "MOVES", False)}
    assert {step for _, step, _ in MOVED} == moving
    assert {name for name, _ in CASES} == set(sweep.modules("weights")) - moving
