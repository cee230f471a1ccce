"""Every mistake in the config is one line, while planning: where, what was got, what is allowed."""

import copy
import json
from datetime import date
from pathlib import Path

import pytest
import yaml
from kvgate.jobs.rows import Row
from kvgate.planning import config, sweep

BASE = Path(__file__).parents[2]
TINY = yaml.safe_load((BASE / "tests/workflow/tiny.yaml").read_text())

LAYERS = "allowed: a number of layers (at least 1), `auto`, or 0 (in one piece)"
W8A16 = {"mask": -1, "config": {"quantized_dtype": "w8a16"}}


def rows(edit=lambda config: None) -> list[Row]:
    override = copy.deepcopy(TINY)
    edit(override)
    return sweep.rows(config.load(BASE, override), BASE)


def block(**change):
    return lambda config: config["sweep"]["blocks"][0].update(change)


def test_the_default_sweep_has_fourteen_rows():
    found = sweep.rows(config.load(BASE, {}), BASE)
    assert len(found) == 14
    assert {row.quant for row in found if row.strategy == "hf_export"} == {"fp16"}


def test_a_block_is_a_cross_product_in_the_order_of_its_lists():
    names = [(row.strategy, row.quant) for row in rows()]
    expected = [("tiny_cpu_managed", "fp16"), ("tiny_cpu_managed", "w8a8"), ("tiny_blend", "fp16")]
    assert names == [*expected, ("tiny_blend", "w8a8")]


def test_exclude_takes_tuples_away():
    found = rows(block(exclude=[{"strategy": "tiny_blend", "quant": ["w8a8", "w4a16"]}]))
    assert [(row.strategy, row.quant) for row in found][-1] == ("tiny_blend", "fp16")
    assert len(found) == 3


def test_host_rows_run_in_onnx_runtime():
    found = rows(block(platforms=["host"], quants=["fp32"], strategies=["tiny_blend"]))
    assert [row.backend for row in found] == ["onnxruntime"]


BOARD = {"platform": "rk3576", "driver": "ssh", "address": "board"}
ONNXRUNTIME = {"platform": "host", "driver": "local", "engine": "onnxruntime"}


def with_boards(backends, **boards):
    return lambda c: (c.update(boards=boards), c["sweep"].update(backends=backends))


def test_a_tuple_on_each_backend_is_a_row():
    found = rows(with_boards(["simulator", "b"], b=BOARD))
    assert [(r.quant, r.backend) for r in found[:4]] == [
        ("fp16", "simulator"), ("fp16", "b"), ("w8a8", "simulator"), ("w8a8", "b"),
    ]  # fmt: skip
    assert len(found) == 8


def test_boards_of_one_device_are_together():
    """Its two engines, say: one job at a time."""
    boards = {"pi_lite": BOARD, "pi_native": BOARD | {"engine": "native"}, "other": BOARD | {"port": 2222}}
    override = copy.deepcopy(TINY) | {"boards": boards}
    assert sweep.devices(config.load(BASE, override)) == [["pi_lite", "pi_native"], ["other"]]


def test_a_board_alone_and_a_board_of_another_chip():
    assert {r.backend for r in rows(with_boards(["b"], b=BOARD))} == {"b"}
    found = rows(lambda c: (with_boards(["a", "b"], a=BOARD, b=BOARD | {"platform": "rk3588"})(c),
                            block(platforms=["rk3576", "rk3588"])(c)))  # fmt: skip
    assert {(r.platform, r.backend) for r in found} == {("rk3576", "a"), ("rk3588", "b")}


def test_the_hosts_graphs_also_run_elsewhere_in_onnx_runtime():
    def edit(c):
        with_boards(["simulator", "onnxruntime-far"], **{"onnxruntime-far": ONNXRUNTIME})(c)
        c["sweep"]["blocks"].append(block_of(c) | {"platforms": ["host"], "quants": ["fp32"]})

    assert {(r.platform, r.backend) for r in rows(edit)} == {
        ("rk3576", "simulator"), ("host", "onnxruntime"), ("host", "onnxruntime-far"),
    }  # fmt: skip


def block_of(config):
    return config["sweep"]["blocks"][0]


def set_at(path: str, value):
    def edit(config):
        *parts, last = path.split("/")
        for part in parts:
            config = config[int(part) if part.isdigit() else part]
        config[last] = value

    return edit


def folder(name: str):
    return set_at("models/tiny/source", {"kind": "folder", "path": f"{{tmp}}/{name}"})


LONGROPE = {"rope_type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
CONFIGS = {"list": "[]", "broken": "{", "llama": json.dumps({"model_type": "llama", "max_position_embeddings": 16})}
BAD = {
    "unknown strategy": (block(strategies=["nope"]), "sweep.blocks[0].strategies[0]: got 'nope', known: cpu_managed,"),
    "unknown quant": (block(quants=["w9"]), "sweep.blocks[0].quants[0]: got 'w9', known: fp16, fp32,"),
    "unknown platform": (block(platforms=["rk1"]), "sweep.blocks[0].platforms[0]: got 'rk1', known: host, rk2118,"),
    "unknown model": (
        block(models=["gpt9"]),
        "sweep.blocks[0].models[0]: got 'gpt9', known: gemma3-270m, smollm2-135m, tiny",
    ),
    "unknown module": (
        set_at("strategies/tiny_blend/module", "nope"),
        "strategies.tiny_blend.module: got 'nope', ",
    ),
    "unknown source": (
        set_at("models/tiny/source/kind", "ftp"),
        "models.tiny.source.kind: got 'ftp', known",
    ),
    "a row that is no kind to ship": (
        set_at("sweep/bundle", ["fail"]),
        'sweep.bundle[0]: got "fail", known: pass, warn, behaves',
    ),
    "unknown program": (set_at("sweep/programs", ["nope"]), "sweep.programs[0]: got 'nope', known: "),
    "unknown key": (
        set_at("sweep/blocs", []),
        "sweep: got the unknown key blocs, known: backends, ",
    ),
    "quant that the chip has not": (
        lambda c: (
            block(quants=["q"])(c),
            c.update(quants={"q": {"mask": -1, "calibrate": True, "config": {"quantized_dtype": "w8a16"}}}),
        ),
        "sweep.blocks[0]: quant q is w8a16, which rk3576 has not; supported: fp16, w8a8, w4a16, w16a16i_dfp",
    ),
    "w4a16 on rk3588": (
        block(quants=["w4a16"], platforms=["rk3588"]),
        "sweep.blocks[0]: quant w4a16 is w4a16, which rk3588 has not; supported: fp16, w8a8, w16a16i_dfp",
    ),
    "context 0": (
        set_at("strategies/tiny_blend/capacity", 0),
        "strategies.tiny_blend.capacity: got 0, allowed:",
    ),
    "context above the model's": (
        set_at("strategies/tiny_blend/capacity", 65),
        "sweep.blocks[0]: strategy tiny_blend has capacity 65, model tiny takes at most 64 tokens",
    ),
    "capacity that no text fills": (
        set_at("strategies/tiny_blend/capacity", 33),
        "sweep.blocks[0]: strategy tiny_blend has capacity 33, which no text of the sweep fills: got at most 32",
    ),
    "one tuple twice": (
        lambda c: c["sweep"]["blocks"].append(c["sweep"]["blocks"][0] | {"quants": ["w8a8"]}),
        "sweep.blocks[1]: defines tiny/plain/tiny_cpu_managed/rk3576/w8a8 again, which sweep.blocks[0] has",
    ),
    "nothing left": (block(exclude=[{"model": "tiny"}]), "sweep.blocks: got no tuple at all"),
    "missing text": (set_at("programs/tiny_chat/text", "nope.txt"), "programs.tiny_chat.text: nope.txt cannot be read"),
    "a calibration text that is verified too": (
        set_at("programs/tiny_calibration_b/text", "tests/texts/fill.txt"),
        "calibration.texts[1]: tiny_calibration_b has the text of program tiny_fill, allowed: another text",
    ),
    "a calibration text that says what is verified, in other lines": (
        lambda c: c["programs"]["tiny_calibration_b"].update(text="{tmp}/again.txt"),
        "calibration.texts[1]: tiny_calibration_b has the text of program tiny_fill, allowed: another text",
    ),
    "a calibration text that begins with what is verified": (
        lambda c: c["programs"]["tiny_calibration_b"].update(text="{tmp}/longer.txt"),
        "calibration.texts[1]: tiny_calibration_b has the text of program tiny_fill, allowed: another text",
    ),
    "a prompt to draw on from what is verified": (
        lambda c: c["programs"]["tiny_calibration_b"].update(text="{tmp}/start.txt", generated=24),
        "calibration.texts[1]: tiny_calibration_b has the text of program tiny_fill, allowed: another text",
    ),
    "everything drawn": (
        set_at("programs/tiny_calibration_a/generated", 32),
        "programs.tiny_calibration_a.generated: got 32, allowed: at most 28 of its 32 tokens, "
        "the first 4 are the text's",
    ),
    "less than nothing drawn": (
        set_at("programs/tiny_calibration_a/generated", -1),
        "programs.tiny_calibration_a.generated: got -1, allowed: at least 0",
    ),
    "a drawn text that is verified": (
        set_at("programs/tiny_fill/generated", 8),
        "programs.tiny_fill.generated: got 8 on kind text, allowed: on kind calibration only",
    ),
    "a text too short to draw on": (
        lambda c: c["programs"]["tiny_calibration_a"].update(text="tests/texts/hi.txt", generated=20),
        "programs.tiny_calibration_a.text: got 3 bytes, too short for 12 tokens",
    ),
    "drawn tokens beyond the capacity": (
        lambda c: c["programs"]["tiny_calibration_a"].update(tokens=40, generated=8),
        "programs.tiny_calibration_a.generated: got 8 of 40 tokens, none of them within the capacity 32 of strategy ",
    ),
    "more samples than text and drawn positions": (
        lambda c: (
            set_at("calibration/samples", 57)(c),
            c["programs"]["tiny_calibration_a"].update(generated=24),
        ),
        "calibration.samples: got 57, allowed: at most 56 positions",
    ),
    "a calibration text above the model's context": (
        lambda c: c["programs"]["tiny_calibration_a"].update(generated=60, tokens=65),
        "sweep.blocks[0]: program tiny_calibration_a has 65 tokens, model tiny takes at most 64 tokens",
    ),
    "a text above the model's context": (
        lambda c: c["programs"]["tiny_fill"].update(tokens=65, text="{tmp}/longer.txt"),
        "sweep.blocks[0]: program tiny_fill has 65 tokens, model tiny takes at most 64 tokens",
    ),
    "short calibration text": (
        set_at("programs/tiny_calibration_a/text", "tests/texts/hi.txt"),
        "programs.tiny_calibration_a.text: got 3 bytes, too short for 32 tokens",
    ),
    "too many samples": (
        set_at("calibration/samples", 65),
        "calibration.samples: got 65, allowed: at most 64",
    ),
    "no calibration text": (
        set_at("calibration/texts", []),
        "sweep.blocks[0]: quant w8a8 calibrates, calibration",
    ),
    "unknown board": (with_boards(["nope"]), "sweep.backends[0]: got 'nope', known: simulator"),
    "a backend twice": (with_boards(["b", "b"], b=BOARD), 'sweep.backends: got ["b", "b"], allowed: every entry once'),
    "a board of another chip": (
        with_boards(["b"], b=BOARD | {"platform": "rk3588"}),
        "sweep.backends[0]: b is a rk3588, the sweep builds for: rk3576",
    ),
    "unknown driver": (
        with_boards(["b"], b=BOARD | {"driver": "telnet"}),
        "boards.b.driver: got 'telnet', known: adb, local, ssh",
    ),
    "a chip that is none": (with_boards(["b"], b=BOARD | {"platform": "rk1"}), "boards.b.platform: got 'rk1', known: "),
    "onnxruntime called a board": (
        with_boards(["b"], b=ONNXRUNTIME),
        "boards.b: got engine onnxruntime on host, allowed: onnxruntime on host, with a name that begins with onnx",
    ),
    "a board called as a backend": (
        with_boards(["simulator"], simulator=BOARD),
        "boards.simulator: got the name 'simulator', allowed: ",
    ),
    "a name for the shell": (
        with_boards(["b"], b=BOARD | {"address": "-oProxyCommand=x"}),
        'boards.b.address: got "-oProxyCommand=x", allowed: ^(',
    ),
    "no address": (with_boards(["b"], b=BOARD | {"address": ""}), "boards.b: lacks address, which driver ssh needs"),
    "a password": (with_boards(["b"], b=BOARD | {"password": "x"}), "boards.b: got the unknown key password, known: "),
    "a preparation that is none": (
        set_at("weights", {"plain": {"steps": [{"name": "smooth"}]}}),
        "weights.plain.steps[0].name: got 'smooth', "
        "known: compensate, fold, gptq, keep, krot, mixed, plain, qkv, rotate, scale, split2, vrot",
    ),
    "split2 with w8a8": (
        block(weights=["split"], quants=["w8a8"]),
        "sweep.blocks[0]: weights split: split2 is for w4a16, quant w8a8 is w8a8",
    ),
    "split2 without its rule off": (
        block(weights=["split"], quants=["w4a16"]),
        "sweep.blocks[0]: weights split: split2 needs config.disable_rules ['fuse_conv_conv_add'] in quant w4a16",
    ),
    "kept where nothing may stay in float16": (
        lambda c: (
            block(weights=["mine"], quants=["w4a16_g32"])(c),
            c.update(weights={"mine": {"steps": [{"name": "keep"}]}}),
        ),
        "sweep.blocks[0]: weights mine: keep needs hybrid ['@kept'] in quant w4a16_g32",
    ),
    "a group that is not the quant's": (
        block(weights=["gptq_g32"], quants=["w4a16"]),
        "sweep.blocks[0]: weights gptq_g32: gptq got group 32, quant w4a16 has 0 (0: a whole channel)",
    ),
    "a family that a preparation does not know": (
        lambda c: (
            block(weights=["rotated"])(c),
            c["models"]["tiny"]["source"]["config"].update(model_type="gemma3_text"),
        ),
        "sweep.blocks[0]: weights rotated: rotate got a gemma3_text, known: llama, mistral, qwen2, ",
    ),
    "a family that a preparation takes from another does not know": (
        lambda c: (block(weights=["scaled"])(c), c["models"]["tiny"]["source"]["config"].update(model_type="bloom")),
        "sweep.blocks[0]: weights scaled: scale got a bloom, known: llama, mistral, qwen2, ",
    ),
    "a preparation of an exporter's graph": (
        lambda c: (
            c["strategies"].update(today={"module": "dynamic_concat", "capacity": 32, "form": "exporter"}),
            block(strategies=["today"], weights=["scaled"])(c),
        ),
        "sweep.blocks[0]: strategy today exports the checkpoint as it is, got weights scaled, allowed: weights without",
    ),
    "an option that a preparation has not": (
        set_at("weights", {"mine": {"steps": [{"name": "scale", "options": {"bi": 2}}]}}),
        "weights.mine.steps[0].options: scale got the unknown option bi, known: by",
    ),
    "an option of another type": (
        set_at("weights", {"mine": {"steps": [{"name": "scale", "options": {"by": "1/32"}}]}}),
        'weights.mine.steps[0].options.by: got "1/32", allowed: number',
    ),
    "patterns that are no list": (
        set_at("weights", {"mine": {"steps": [{"name": "split2", "options": {"only": "*mlp*"}}]}}),
        'weights.mine.steps[0].options.only: got "*mlp*", allowed: array',
    ),
    "statistics without texts": (
        set_at("weights", {"mine": {"steps": [{"name": "qkv"}]}}),
        "weights.mine: qkv reads the calibration texts, lacks calibrate: true",
    ),
    "infinite mask": (
        lambda c: c.update(quants={"fp16": {"mask": -1e9}}),
        "quants.fp16.mask: got -1000000000.0, allowed: at least -65504",
    ),
    "fp16 on the host": (block(platforms=["host"]), "sweep.blocks[0]: got quant fp16 on platform host, allowed: fp32"),
    "recompute on a chip": (
        lambda c: (c["strategies"].update(r={"module": "recompute", "capacity": 32}), block(strategies=["r"])(c)),
        "sweep.blocks[0]: strategy r recomputes, allowed: platform host only",
    ),
    "a name that is no part of a path": (
        lambda c: c.update(models={"Qwen/Qwen2.5-0.5B": {"source": {"kind": "folder", "path": "x"}}}),
        "models: got the name 'Qwen/Qwen2.5-0.5B', allowed: letters, digits, _ . + -",
    ),
    "a name that leaves its folder": (
        lambda c: c.update(strategies={"..": {"module": "cpu_managed", "capacity": 4}}),
        "strategies: got the name '..', allowed: ",
    ),
    "a source that lacks what its kind needs": (
        lambda c: c.update(models={"mine": {"source": {"kind": "hub", "id": "a/b"}}}),
        "models.mine.source: lacks revision, which kind hub needs",
    ),
    "a branch, which moves": (
        lambda c: c.update(models={"mine": {"source": {"kind": "hub", "id": "a/b", "revision": "main"}}}),
        "models.mine.source.revision: got 'main', allowed: [0-9a-f]{40}",
    ),
    "a key that no source of the kind has": (
        lambda c: c.update(models={"mine": {"source": {"kind": "gguf", "path": "x.gguf", "sha265": "0"}}}),
        "models.mine.source: got 'sha265', known: kind, licence, path, sha256",
    ),
    "another kind's key": (
        lambda c: c.update(models={"mine": {"source": {"kind": "folder", "path": "x", "version": "1"}}}),
        "models.mine.source: got 'version', known: kind, licence, path",
    ),
    "a version that YAML took for a number": (
        lambda c: c.update(models={"mine": {"source": {"kind": "package", "name": "a", "version": 1.1, "file": "f"}}}),
        "models.mine.source.version: got 1.1, allowed: a text",
    ),
    "a folder that is not there": (
        lambda c: (
            c.update(models={"mine": {"source": {"kind": "folder", "path": "no/such"}}}),
            block(models=["mine"])(c),
        ),
        "models.mine.source.path: got 'no/such', allowed: what is there, seen from the repository",
    ),
    "an exclude that takes nothing away": (
        block(exclude=[{"strategy": "tiny_blnd"}]),
        "sweep.blocks[0].exclude[0]: got {'strategy': 'tiny_blnd'}, which takes no tuple away",
    ),
    "pass above warn": (
        set_at("thresholds", {"logits_l2": {"pass": 0.1}}),
        "thresholds.logits_l2.pass: got 0.1, allowed: at most warn, 0.005",
    ),
    "a chat alone, which may end early": (
        lambda c: (c["sweep"].update(programs=["tiny_chat"]), c["programs"]["tiny_chat"].update(tokens=99)),
        "sweep.blocks[0]: strategy tiny_cpu_managed has capacity 32, which no text of the sweep fills: got at most 0 ",
    ),
    "a name that is a number": (
        lambda c: c["models"].update({1: c["models"]["tiny"]}),
        "models: got the name 1, allowed: a text, in quotes",
    ),
    "a name that is a date": (
        set_at("sweep/name", date(2024, 1, 1)),
        "sweep.name: got the date 2024-01-01, allowed: a text, in quotes",
    ),
    "a date where anything may stand": (
        lambda c: c.update(quants={"fp16": {"mask": -1, "config": {"optimization_level": date(2024, 1, 1)}}}),
        "quants.fp16.config.optimization_level: got the date 2024-01-01, allowed: ",
    ),
    "not a number": (
        set_at("thresholds", {"kv_l2": {"pass": float("nan")}}),
        "thresholds.kv_l2.pass: got nan, allowed: a finite number",
    ),
    "an endless list": (
        set_at("sweep/blocks/0/quants", ["fp16", float("inf")]),
        "sweep.blocks[0].quants[1]: got inf, allowed: a finite number",
    ),
    "a number that is a text": (
        set_at("models/tiny/source/config/num_experts", "8"),
        "sweep.blocks[0]: model tiny: config.json: num_experts: got '8', allowed: a number",
    ),
    "a number that is a list": (
        set_at("models/tiny/source/config/max_position_embeddings", [64]),
        "sweep.blocks[0]: model tiny: config.json: max_position_embeddings: got [64], allowed: a number",
    ),
    "a config.json that is a list": (folder("list"), "{tmp}/list/config.json: got list, allowed: keys and values"),
    "a config.json that is none": (folder("broken"), "{tmp}/broken/config.json: is no JSON: Expecting "),
    "a context beyond the model's own": (
        lambda c: (folder("llama")(c), c["models"]["tiny"].update(context=8192)),
        "sweep.blocks[0]: strategy tiny_cpu_managed has capacity 32, model tiny takes at most 16 tokens",
    ),
    "a capacity across what a rotary embedding changes at": (
        set_at("models/tiny/source/config/rope_scaling", LONGROPE | {"original_max_position_embeddings": 31}),
        "sweep.blocks[0]: strategy tiny_cpu_managed has capacity 32, model tiny takes at most 31 tokens (in longer "
        "texts its rotary embedding is another one)",
    ),
    "a text across what a rotary embedding changes at": (
        lambda c: (
            set_at("models/tiny/source/config/original_max_position_embeddings", 32)(c),
            set_at("models/tiny/source/config/rope_parameters", {"full_attention": LONGROPE})(c),
            c["programs"]["tiny_fill"].update(tokens=33, text="{tmp}/longer.txt"),
        ),
        "sweep.blocks[0]: program tiny_fill has 33 tokens, model tiny takes at most 32 tokens",
    ),
    "layers that keep a state": (
        set_at("models/tiny/source/config/layer_types", ["full_attention", "linear_attention"]),
        "sweep.blocks[0]: model tiny: model type 'llama': layers with a recurrent state",
    ),
    "a calibration text that is verified but for a word": (
        lambda c: c["programs"]["tiny_calibration_b"].update(text="{tmp}/edited.txt"),
        "calibration.texts[1]: tiny_calibration_b has the text of program tiny_fill, allowed: another text",
    ),
    "a prefill step longer than the cache": (
        set_at("strategies/tiny_blend/prefill", 64),
        "strategies.tiny_blend.prefill: got 64, allowed: 0, or 2 to the capacity, 32",
    ),
    "a prefill step of one token": (
        set_at("strategies/tiny_blend/prefill", 1),
        "strategies.tiny_blend.prefill: got 1, allowed: 0, or 2 to the capacity, 32",
    ),
    "a prefill part of an exporter's graph": (
        lambda c: c["strategies"]["tiny_blend"].update(form="exporter", prefill=8),
        "strategies.tiny_blend.prefill: got 8 with form exporter, allowed: 0",
    ),
    "pieces of one tensor for all layers": (
        lambda c: c["strategies"]["tiny_blend"].update(packing="model", layers=1),
        "strategies.tiny_blend.layers: got 1 with packing model, allowed: 0: one piece",
    ),
    "layers that are no number": (
        set_at("strategies/tiny_blend/layers", "soon"),
        f'strategies.tiny_blend.layers: got "soon", {LAYERS}',
    ),
    "half a layer": (
        set_at("strategies/tiny_blend/layers", 0.5),
        f"strategies.tiny_blend.layers: got 0.5, {LAYERS}",
    ),
    "fewer layers than none": (
        set_at("strategies/tiny_blend/layers", -1),
        f"strategies.tiny_blend.layers: got -1, {LAYERS}",
    ),
    "not a list": (set_at("sweep/programs", "tiny_chat"), 'sweep.programs: got "tiny_chat", allowed: array'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name, tmp_path):
    edit, expected = BAD[name]
    fill = (BASE / "tests/texts/fill.txt").read_text()
    (tmp_path / "again.txt").write_text(fill.replace(" ", "\n") + "\n")
    (tmp_path / "longer.txt").write_text(fill + " And more of it.")
    (tmp_path / "start.txt").write_text(fill[:20])
    (tmp_path / "edited.txt").write_text("Or " + fill)
    for name, text in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)

    def placed(c):
        edit(c)
        for entry in (*c["programs"].values(), *(x["source"] for x in c["models"].values())):
            for key in entry.keys() & {"text", "path"}:
                entry[key] = entry[key].replace("{tmp}", str(tmp_path))

    with pytest.raises(config.ConfigError) as error:
        rows(placed)
    assert str(error.value).startswith(expected.replace("{tmp}", str(tmp_path)))
    assert "\n" not in str(error.value)


def test_what_just_fits():
    def edit(c):
        c["programs"]["tiny_calibration_a"].update(tokens=64, generated=48)
        c["calibration"]["samples"] = 48

    assert len(rows(edit)) == 4
    with pytest.raises(config.ConfigError, match="allowed: at most 48 positions"):
        rows(lambda c: (edit(c), set_at("calibration/samples", 49)(c)))


def test_up_to_where_a_rotary_embedding_changes():
    longrope = LONGROPE | {"original_max_position_embeddings": 32}
    assert len(rows(set_at("models/tiny/source/config/rope_scaling", longrope))) == 4


def test_a_text_may_begin_with_a_prompt_s_word(tmp_path):
    prompt = (BASE / "tests/texts/hi.txt").read_text().strip()
    (tmp_path / "a.txt").write_text(f"{prompt} is what they say to each other in the hills.")
    rows(set_at("programs/tiny_calibration_a/text", str(tmp_path / "a.txt")))
    (tmp_path / "a.txt").write_text(f"{prompt} \n")
    with pytest.raises(config.ConfigError, match="has the text of program tiny_chat"):
        rows(lambda c: c["programs"]["tiny_calibration_a"].update(text=str(tmp_path / "a.txt"), generated=28))


def test_an_empty_prompt_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(config.ConfigError, match=r"empty\.txt is empty"):
        rows(set_at("programs/tiny_chat/text", str(tmp_path / "empty.txt")))


def test_broken_yaml_is_one_line(tmp_path):
    (tmp_path / "a.yaml").write_text("sweep: [\n")
    with pytest.raises(config.ConfigError, match=r"a\.yaml: is no YAML: ") as error:
        config.override([tmp_path / "a.yaml"], "")
    assert "\n" not in str(error.value)


def test_the_command_line_goes_over_files(tmp_path):
    (tmp_path / "a.yaml").write_text(json.dumps({"sweep": {"name": "a", "isolated": 3}}))
    merged = config.override([tmp_path / "a.yaml"], '{"sweep": {"isolated": 5}}')
    assert merged == {"sweep": {"name": "a", "isolated": 5}}


def test_an_architecture_without_a_cache_is_refused_while_planning():
    with pytest.raises(config.ConfigError, match=r"sweep\.blocks\[0\]: model tiny: "):
        rows(set_at("models/tiny/source/config", {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
