"""Faults in what comes in: checkpoints, GGUF files, tokenizers, templates, texts. The stage that takes it in names it.

A whole sweep is asked for each time: nothing after the stage runs, and the row is blocked.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kvgate.jobs import record
from kvgate.planning.config import ConfigError
from planting import INT8, PROGRAMS, SLOTS, Faults, Sweep, config, red
from safetensors.torch import load_file, save_file
from sources import tiny_gguf

ROWS = {"strategies": ["managed"], "platforms": ["host"], "quants": ["fp32"]}
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


# A checkpoint's folder

folder = Faults("fetch")


def changed(path: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def reconfigured(path: Path, **keys: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@folder(says=r"model\.layers\.1\.mlp\.up_proj\.weight")
def a_weight_is_missing(path: Path) -> None:
    changed(path, lambda x: x.pop("model.layers.1.mlp.up_proj.weight"))


@folder(says=r"model\.layers\.0\.mlp\.gate_proj\.bias")
def a_weight_has_no_place(path: Path) -> None:
    changed(path, lambda x: x.update({"model.layers.0.mlp.gate_proj.bias": torch.ones(96)}))


@folder(says=r"model\.layers\.2\.")
def the_config_has_fewer_layers_than_the_file(path: Path) -> None:
    reconfigured(path, num_hidden_layers=2, layer_types=["full_attention"] * 2)


@folder(says=r"model\.layers\.3\.")
def the_config_has_more_layers_than_the_file(path: Path) -> None:
    reconfigured(path, num_hidden_layers=4, layer_types=["full_attention"] * 4)


@folder(says=r"down_proj.weight: got integers")
def weights_are_int8_and_nothing_says_so(path: Path) -> None:
    def change(x: Tensors) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        x[f"{name}_scale"] = x[name].abs().amax(1, keepdim=True) / 127
        x[name] = (x[name] / x[f"{name}_scale"]).round().to(torch.int8)

    changed(path, change)


@folder(says=r"weight_scale|F8_E4M3")
def weights_are_float8_and_nothing_says_so(path: Path) -> None:
    def change(x: Tensors) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        x[name] = x[name].to(torch.float8_e4m3fn)

    changed(path, change)


@folder(says=r"model\.norm\.weight.* \[63\]")
def a_weight_has_another_shape(path: Path) -> None:
    changed(path, lambda x: x.update({"model.norm.weight": torch.ones(63)}))


@folder(says=r"model\.layers\.0\.self_attn\.k_proj\.weight: got NaN or inf")
def a_weight_is_not_a_number(path: Path) -> None:
    changed(path, lambda x: x["model.layers.0.self_attn.k_proj.weight"].__setitem__((3, 4), float("nan")))


@folder(says=WEIGHTS)
def the_weights_are_cut(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) * 2 // 3])


@folder(says=WEIGHTS)
def the_weights_are_empty(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"")


@folder(says=f"{WEIGHTS}.*LFS pointer")
def the_weights_are_a_pointer(path: Path) -> None:
    (path / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 523384\n")


@folder(says=r"model-00002-of-00002\.safetensors")
def a_shard_is_missing(path: Path) -> None:
    names = sorted(load_file(path / WEIGHTS))
    (path / WEIGHTS).rename(path / "model-00001-of-00002.safetensors")
    where = {x: f"model-0000{1 + (n > 9)}-of-00002.safetensors" for n, x in enumerate(names)}
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": where}))


@folder(says=r"model\.norm\.weight: got it twice")
def two_shards_hold_the_same_tensor(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    parts = {"a.safetensors": tensors, "b.safetensors": {"model.norm.weight": torch.ones(64)}}
    for name, part in parts.items():
        save_file(part, path / name, metadata={"format": "pt"})
    where = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": where}))


@folder(says=r"adapter_config\.json beside a model")
def an_adapter_lies_beside_the_model(path: Path) -> None:
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (path / "adapter_model.safetensors").write_bytes(b"")


@folder(says="an adapter: merge it first")
def there_is_only_an_adapter(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')


@folder(says=r"config\.json: quantization_config: got 'gptq'")
def the_weights_are_quantized(path: Path) -> None:
    reconfigured(path, quantization_config={"quant_method": "gptq", "bits": 4})


@folder(says=r"inv_freq: got other rotary frequencies")
def stored_frequencies_are_not_the_configs(path: Path) -> None:
    changed(path, lambda x: x.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))


@folder(says=r"tokenizer\.json: is no JSON")
def the_tokenizer_is_damaged(path: Path) -> None:
    (path / "tokenizer.json").write_text("{ no json")


@folder(says="tokenizer: got no file of one")
def the_tokenizer_is_missing(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


def of(tmp_path: Path, source: dict[str, Any], **changes: Any) -> Sweep:
    models = {"tiny": {"build_mb": 1500, "source": source}}
    return Sweep(tmp_path / "work", config(ROWS, models=models, **changes))


@pytest.mark.parametrize(("plant", "place"), folder.cases())
def test_a_checkpoint_is_refused_by_name(mine, tmp_path, plant, place):
    plant(mine)
    sweep = of(tmp_path, {"kind": "folder", "path": str(mine)}).run()
    assert sweep.failed == {}
    red(sweep, place)


def test_the_folder_itself_is_right(mine, tmp_path):
    sweep = of(tmp_path, {"kind": "folder", "path": str(mine)}).run()
    assert sweep.failed == {} and sweep.body("judge")["verdict"] == "pass"


@pytest.mark.parametrize("text", ["[]", "{ no json", ""])
def test_a_config_that_is_none_is_one_line_while_planning(mine, tmp_path, text):
    (mine / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: ") as why:
        of(tmp_path, {"kind": "folder", "path": str(mine)})
    assert "\n" not in str(why.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"kind": "folder", "path": "mine", "sha265": "0" * 64}, "sha265"),
        ({"kind": "ftp", "path": "mine"}, "ftp"),
        ({"kind": "folder"}, "lacks path"),
        ({"kind": "hub", "id": "owner/name", "revision": "main"}, "revision"),
    ],
    ids=["an unknown key", "an unknown kind", "no path", "a branch"],
)
def test_a_source_is_refused_while_planning(tmp_path, source, says):
    with pytest.raises(ConfigError, match=says):
        of(tmp_path, source)


# A GGUF file

file = Faults("fetch")
Change = Callable[[Any], None]


def written(path: Path, model: Any, change: Change = lambda writer: None) -> Path:
    """The model as GGUF; `change(writer)` is called before anything is written."""
    right = gguf.GGUFWriter.write_header_to_file

    def write_header_to_file(self: Any, *args: Any) -> None:
        change(self)
        right(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", write_header_to_file)
        tiny_gguf.write(path, model)
    return path


def without(writer: Any, begin: str) -> None:
    for tensors in writer.tensors:
        for name in [x for x in tensors if x.startswith(begin)]:
            del tensors[name]


@file(says=r"blk\.1\.ffn_up|model\.layers\.1\.mlp\.up_proj")
def a_tensor_is_missing(path: Path, model: Any) -> None:
    written(path, model, lambda w: without(w, "blk.1.ffn_up"))


@file(says=r"got no tensor of blk\.1")
def a_block_is_missing(path: Path, model: Any) -> None:
    written(path, model, lambda w: without(w, "blk.1."))


@file(says=r"got tensors of blk\.2")
def a_block_is_too_many(path: Path, model: Any) -> None:
    written(path, model, lambda w: w.add_tensor("blk.2.attn_q.weight", np.ones((64, 64), np.float32)))


@file(says="split GGUF, part 1 of 2")
def one_part_of_a_split_file(path: Path, model: Any) -> None:
    def change(writer: Any) -> None:
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", 0)
        without(writer, "blk.1.")

    written(path, model, change)


@file(says="bytes after the last tensor")
def two_parts_one_after_the_other(path: Path, model: Any) -> None:
    data = written(path, model).read_bytes()
    path.write_bytes(data + data)


@file(says=r"blk\.0\.attn_sinks")
def a_tensor_has_no_place(path: Path, model: Any) -> None:
    written(path, model, lambda w: w.add_tensor("blk.0.attn_sinks", np.ones(64, np.float32)))


@file(says=r"rope_freqs\.weight")
def frequencies_follow_no_known_rule(path: Path, model: Any) -> None:
    written(path, model, lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 3, 1, 5, 1, 7, 1, 9], np.float32)))


@file(says=r"rope\.scaling\.type: got 'spiral'")
def positions_are_scaled_in_an_unknown_way(path: Path, model: Any) -> None:
    written(path, model, lambda w: w.add_string("llama.rope.scaling.type", "spiral"))


@file(says=r"llama\.attention\.temperature_scale")
def a_key_of_the_model_has_no_place(path: Path, model: Any) -> None:
    written(path, model, lambda w: w.add_float32("llama.attention.temperature_scale", 0.5))


@file(says="an adapter: merge it first")
def the_file_is_an_adapter(path: Path, model: Any) -> None:
    written(path, model, lambda w: w.add_string("general.type", "adapter"))


@file(says=r"mine\.gguf: cannot be read")
def the_file_is_cut(path: Path, model: Any) -> None:
    data = written(path, model).read_bytes()
    path.write_bytes(data[: len(data) // 2])


@file(says="got first bytes b'GGML'")
def the_file_is_of_an_older_format(path: Path, model: Any) -> None:
    path.write_bytes(b"GGML" + written(path, model).read_bytes()[4:])


@file(says="lacks the key llama.block_count")
def the_number_of_blocks_is_missing(path: Path, model: Any) -> None:
    written(path, model, lambda w: [x.pop("llama.block_count") for x in w.kv_data])


@pytest.mark.parametrize(("plant", "place"), file.cases())
def test_a_gguf_file_is_refused_by_name(llama, tmp_path, plant, place):
    plant(tmp_path / "mine.gguf", llama)
    sweep = of(tmp_path, {"kind": "gguf", "path": str(tmp_path / "mine.gguf")}).run()
    assert sweep.failed == {}
    red(sweep, place)


def test_the_gguf_file_itself_is_right(llama, tmp_path):
    path = written(tmp_path / "mine.gguf", llama)
    sweep = of(tmp_path, {"kind": "gguf", "path": str(path)}).run()
    assert sweep.failed == {} and sweep.body("judge")["verdict"] == "pass"


def test_one_bit_of_a_pinned_gguf_file(llama, tmp_path):
    path = written(tmp_path / "mine.gguf", llama)
    pinned = record.sha256(path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    sweep = of(tmp_path, {"kind": "gguf", "path": str(path), "sha256": pinned}).run()
    assert sweep.body("judge")["first"]["stage"] == "fetch"
    assert "got sha256" in sweep.body("judge")["reason"]


# Templates and texts


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no user here') }}", "{% if %}", "{{ messages[9].content }}"],
    ids=["raises", "bad syntax", "no such message"],
)
def test_a_template_that_cannot_be_used(mine, tmp_path, template):
    (mine / "chat_template.jinja").write_text(template)
    sweep = of(tmp_path, {"kind": "folder", "path": str(mine)}).run()
    assert sweep.failed == {}
    assert sweep.body("judge")["first"] == {"stage": "trace"}
    assert sweep.body("judge")["reason"].startswith("chat template: ")
    assert sweep.body("trace")["status"] == "ok"  # the text needs none


def test_a_template_that_asks_for_the_date_gets_one_that_stays(mine, tmp_path, monkeypatch):
    """Else a conversation of tomorrow would not be the one that was verified."""
    (mine / "chat_template.jinja").write_text("{{ strftime_now('%d %B %Y') }} {{ messages[0].content }}")
    source = {"kind": "folder", "path": str(mine)}
    first = of(tmp_path, source).run().body("trace", program="talk")["tokens"]
    import transformers.utils.chat_template_utils as templates

    class Tomorrow(templates.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2031, 3, 9)

    monkeypatch.setattr(templates, "datetime", Tomorrow)
    assert of(tmp_path, source).run("trace").body("trace", program="talk")["tokens"] == first


text = Faults("trace")
LONG = "many words in a row " * 30


@text(says="special token '<|end|>'")
def a_prompt_holds_a_special_token(base: Path) -> dict[str, Any]:
    return written_text(base, "talk", "Hi<|end|>")


@text(says=f"text too short: got 3 tokens, needed {SLOTS}")
def a_text_is_too_short(base: Path) -> dict[str, Any]:
    return written_text(base, "fill", "abc" + " " * SLOTS)


@text(says="the context limit")
def a_prompt_is_longer_than_the_model_takes(base: Path) -> dict[str, Any]:
    return written_text(base, "talk", LONG)


@text(says="got a prompt of", stage="check")
def a_prompt_is_longer_than_the_cache(base: Path) -> dict[str, Any]:
    return written_text(base, "talk", "twenty or more of these")


def written_text(base: Path, name: str, words: str) -> dict[str, Any]:
    path = base / f"{name}.txt"
    path.write_text(words, encoding="utf-8")
    return PROGRAMS | {name: PROGRAMS[name] | {"text": str(path)}}


@pytest.mark.parametrize(("plant", "place"), text.cases())
def test_a_text_is_refused_by_name(host, tmp_path, plant, place):
    sweep = host.planned(config(ROWS, programs=plant(tmp_path))).run("trace")
    assert sweep.failed == {}
    red(sweep, place)


@pytest.mark.parametrize("data", [b"", b" \n", b"caf\xe9 au lait, bien s\xfbr"], ids=["empty", "blank", "not UTF-8"])
def test_a_text_of_nothing_is_refused_while_planning(tmp_path, data):
    (tmp_path / "talk.txt").write_bytes(data)
    programs = PROGRAMS | {"talk": PROGRAMS["talk"] | {"text": str(tmp_path / "talk.txt")}}
    with pytest.raises(ConfigError, match=r"talk"):
        Sweep(tmp_path, config(ROWS, programs=programs))


def test_a_calibration_that_has_seen_what_is_verified(chip, tmp_path):
    """Another text by its words, the same as far as the cache reaches."""
    words = Path(__file__).parents[1].joinpath("texts/fill.txt").read_text(encoding="utf-8")
    programs = written_text(tmp_path, "warm_a", words.replace("slot", "sleeve"))
    told = chip.planned(INT8 | {"programs": programs}).run("trace")
    assert told.body("judge")["first"]["stage"] == "build"
    assert "calibration text warm_a: got the first 32 tokens of program fill" in told.body("judge")["reason"]
