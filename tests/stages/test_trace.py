import copy
import hashlib
import shutil

import numpy as np
import pytest
from kvgate.checkpoint import reference
from kvgate.jobs import record
from kvgate.observe import Trace
from kvgate.stages import trace
from tiny import edit, fetched, random_source, relist, trace_job, traced
from tokenizers import AddedToken


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    fetched(results)
    return results


@pytest.fixture(scope="module")
def tokenizer(results):
    return reference.load_tokenizer(results / "models/tiny/checkpoint")


def blocked(results, text, base, **program):
    with pytest.raises(record.Blocked) as caught:
        traced(results, text, base, **program)
    assert "\n" not in caught.value.reason
    return caught.value.reason


CHAT = {"kind": "chat", "tokens": 6}


def test_the_chat_template_is_applied_once(results, tokenizer, tmp_path):
    body, _ = traced(results, "Hi\n", tmp_path, **CHAT)
    wanted = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(body["tokens"][: body["prompt"]]) == wanted
    assert body["tokens"].count(tokenizer.bos_token_id) == 2
    digest = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    assert body["tokenizer"]["chat_template_sha256"] == digest


def test_a_prompt_that_already_went_through_a_template_is_refused(results, tmp_path):
    assert "special token '<|start|>'" in blocked(results, "<|start|>user\nHi<|end|>", tmp_path, **CHAT)


def test_an_added_token_that_steers_is_refused_though_it_is_not_called_special(tokenizer):
    """A bundle takes its spelling as plain text; words that were added are text on both sides."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<filename>", "kvgate"])
    with pytest.raises(record.Blocked, match="special token '<filename>'"):
        trace.prompt_ids(other, "see <filename> there")
    with pytest.raises(record.Blocked, match="special token '<filename>'"):
        trace.prompt_ids(_without_template(other), "see <filename> there")
    assert other.convert_tokens_to_ids("kvgate") in trace.prompt_ids(other, "see kvgate there")


def test_raw_tokens_without_a_template(tokenizer):
    bare = trace.prompt_ids(_without_template(tokenizer), "Hi")
    assert tokenizer.decode(bare) == "Hi"
    assert trace.prompt_ids(tokenizer, "Hi") != bare


def with_template(results, folder, template, tokens=()):
    """A copy of the results whose tokenizer has another template."""
    shutil.copytree(results, folder)
    other = reference.load_tokenizer(folder / "models/tiny/checkpoint")
    other.add_tokens([AddedToken(x, special=True) for x in tokens])
    other.chat_template = template
    other.save_pretrained(folder / "models/tiny/checkpoint")
    relist(folder / "models/tiny/checkpoint/manifest.json")
    return folder


TURN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|turn|>\n{% endfor %}"
BAD_TEMPLATES = {
    "{{ raise_exception('no chats\ntoday') }}": "chat template: TemplateError: no chats",
    "{% for m in messages %}": "chat template: TemplateSyntaxError: Unexpected end of template.",
    "{{ messages[7].content }}": "chat template: UndefinedError: list object has no element 7",
    "{{ 1 / 0 }}": "chat template: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("template", BAD_TEMPLATES)
def test_a_template_that_cannot_be_used_blocks_its_chats(results, tmp_path, template):
    other = with_template(results, tmp_path / "results", template)
    assert blocked(other, "Hi", tmp_path, **CHAT).startswith(BAD_TEMPLATES[template])
    traced(other, "A plain text of some length.", tmp_path, kind="text", tokens=16)


def test_templates_with_names_alone_block_and_a_default_is_taken(tokenizer):
    named = copy.deepcopy(tokenizer)
    named.chat_template = {"tool_use": TURN, "rag": TURN}
    with pytest.raises(record.Blocked, match=r"chat template: got only named ones \(rag, tool_use\), allowed: one, or"):
        trace.prompt_ids(named, "Hi")
    named.chat_template |= {"default": tokenizer.chat_template}
    assert trace.prompt_ids(named, "Hi") == trace.prompt_ids(tokenizer, "Hi")


def test_a_template_s_day_is_always_the_same_and_the_record_says_which(results, tokenizer, tmp_path):
    """Real days would give other tokens under equal keys."""
    dated = "{{ strftime_now('%d %B %Y') }}: {{ messages[0].content }}"
    body, _ = traced(with_template(results, tmp_path / "results", dated), "Hi", tmp_path, **CHAT)
    assert tokenizer.decode(body["tokens"][: body["prompt"]]) == "26 July 2024: Hi"
    assert body["tokenizer"]["today"] == "2024-07-26"
    assert traced(results, "Hi", tmp_path, **CHAT)[0]["tokenizer"]["today"] is None


def test_what_generate_would_do_otherwise_is_a_finding(results, tmp_path):
    other = with_template(results, tmp_path / "results", TURN, ["<|turn|>"])
    path = other / "models/tiny/checkpoint/generation_config.json"
    settings = {"repetition_penalty": 1.1, "suppress_tokens": [3, 4], "min_new_tokens": 0, "num_beams": 1}
    edit(path, **settings, do_sample=True, temperature=0.6)
    findings = traced(other, "Hi", tmp_path, **CHAT)[0]["findings"]
    assert [x["kind"] for x in findings] == ["generation", "turn_end"]
    assert findings[0]["text"] == (
        "generation_config.json: repetition_penalty 1.1, suppress_tokens [3, 4]: not used, the trace and the bundle "
        "take the best token each step"
    )
    assert findings[1]["text"].startswith("the chat template ends a turn with '<|turn|>', which no list of end ids has")
    assert traced(other, "A plain text of some length.", tmp_path, kind="text", tokens=16)[0]["findings"] == []
    edit(path, repetition_penalty=1.0, suppress_tokens=[], eos_token_id=[257, 259])
    assert traced(other, "Hi", tmp_path, **CHAT)[0]["findings"] == []
    assert traced(results, "Hi", tmp_path, **CHAT)[0]["findings"] == []


def _without_template(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    return other


def test_a_chat_s_record_and_arrays_agree(results, tokenizer, tmp_path):
    body, path = traced(results, "Hi", tmp_path, **CHAT)
    found = Trace.load(str(path))
    assert body["files"] == {"trace.npz": record.sha256(path)}
    assert body["tokens"] == found.tokens.tolist() and len(body["tokens"]) == body["prompt"] + 6
    assert body["text"] == tokenizer.decode(body["tokens"][body["prompt"] :]) and not body["ended"]
    assert body["end_ids"] == [257] and body["perplexity"] is None and body["states"] == 4
    assert found.logits.shape == (len(body["tokens"]), 300)
    assert found.states["layers.0.key"].dtype == np.float32


def test_a_text_starts_at_its_start_and_has_a_perplexity(results, tokenizer, tmp_path):
    body, path = traced(results, "A plain text of some length.", tmp_path, kind="text", tokens=16)
    assert tokenizer.decode(body["tokens"]) == "A plain text of "
    assert body["prompt"] == 16 and body["text"] == "" and body["tokenizer"]["chat_template_sha256"] is None
    found = Trace.load(str(path))
    assert body["perplexity"] == pytest.approx(reference.perplexity(found.tokens, found.logits))
    assert 50 < body["perplexity"] < 2000  # random weights: about the vocabulary of 300


def test_a_calibration_text_has_no_logits(results, tmp_path):
    body, path = traced(results, "A plain text of some length.", tmp_path, kind="calibration", tokens=16)
    assert Trace.load(str(path)).logits is None and body["perplexity"] is None


def test_equal_work_is_equal(results, tmp_path):
    assert traced(results, "Hi", tmp_path, **CHAT) == traced(results, "Hi", tmp_path, **CHAT)


def test_it_stops_at_the_context_limit(results, tmp_path):
    body, _ = traced(results, "x" * 20, tmp_path, kind="chat", tokens=500)
    assert len(body["tokens"]) == 64


@pytest.mark.parametrize("kind", ["chat", "text", "calibration"])
@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_an_empty_text(results, tmp_path, kind, text):
    assert "got an empty text" in blocked(results, text, tmp_path, kind=kind)


def test_a_prompt_longer_than_the_context(results, tmp_path):
    assert "allowed: at most 63" in blocked(results, "x" * 100, tmp_path, **CHAT)


def test_a_text_longer_than_the_context(results, tmp_path):
    assert "text: got 65 tokens, allowed: at most 64" in blocked(results, "x" * 100, tmp_path, kind="text", tokens=65)


def test_a_text_that_is_too_short(results, tmp_path):
    for kind in ("text", "calibration"):
        assert blocked(results, "short", tmp_path, kind=kind, tokens=16) == "text too short: got 5 tokens, needed 16"


def test_a_text_that_does_not_exist(results, tmp_path):
    job = trace_job(results, {"kind": "chat", "text": "nowhere.txt", "tokens": 4}, tmp_path)
    with pytest.raises(record.Blocked, match=r"text nowhere\.txt: got no such file"):
        trace.run(job)


def test_an_unknown_kind(results, tmp_path):
    assert "known: chat, text, calibration" in blocked(results, "Hi", tmp_path, kind="poem")


def test_token_ids_outside_the_vocabulary():
    trace.check_ids([0, 299], 300, None, False)
    for wrong in (300, -1):
        with pytest.raises(record.Blocked, match=f"token id: got {wrong}, allowed: 0 to 299"):
            trace.check_ids([5, wrong], 300, None, False)
    with pytest.raises(record.Blocked, match="got no tokens"):
        trace.check_ids([], 300, None, False)


def test_a_tokenizer_with_more_tokens_than_the_model(results, tokenizer, tmp_path):
    """From end to end: the checkpoint's tokenizer learns words that the model has no rows for."""
    other = tmp_path / "results"
    shutil.copytree(results, other)
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"word{i:02}" for i in range(60)])  # ids 259 to 318 of a vocabulary of 300
    larger.save_pretrained(other / "models/tiny/checkpoint")
    relist(other / "models/tiny/checkpoint/manifest.json")
    assert blocked(other, "word59", tmp_path, **CHAT) == "token id: got 318, allowed: 0 to 299"
    traced(other, "word00", tmp_path, **CHAT)


def test_another_model_another_trace(results, tmp_path):
    other = tmp_path / "other"
    fetched(other, random_source() | {"seed": 4})
    one, two = (traced(x, "Hi", tmp_path, **CHAT)[0]["files"] for x in (results, other))
    assert one != two


PROSE = "A plain text of some length, and then some more."


def test_drawn_tokens_are_frozen_and_the_record_says_which(results, tokenizer, tmp_path):
    body, path = traced(results, PROSE, tmp_path, kind="calibration", tokens=48, generated=32)
    found = Trace.load(str(path))
    assert body["tokens"] == found.tokens.tolist() and len(body["tokens"]) == 48
    assert body["prompt"] == found.prompt == 16 and tokenizer.decode(body["tokens"][:16]) == PROSE[:16]
    seed = reference.seed(body["tokens"][:16])
    assert body["drawn"] == {"first": 16, "count": 32, "seed": seed, "temperature": 1.0, "top_k": 50}
    assert not set(body["tokens"][16:]) & set(body["end_ids"]) and not body["ended"]
    assert body["text"] == tokenizer.decode(body["tokens"][16:]) and found.logits is None
    model = reference.load(results / "models/tiny/checkpoint")
    _, states = reference.whole(model, body["tokens"])
    np.testing.assert_allclose(found.states["layers.1.key"], states["layers.1.key"], atol=1e-6)
    assert traced(results, PROSE, tmp_path, kind="calibration", tokens=48, generated=32)[0] == body
    assert traced(results, PROSE, tmp_path, kind="calibration", tokens=48)[0]["drawn"] is None


def test_drawn_tokens_beyond_the_context_are_refused_before_they_are_drawn(results, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "draw", None)
    wrong = {"kind": "calibration", "tokens": 65, "generated": 60}
    assert "text: got 65 tokens, allowed: at most 64" in blocked(results, PROSE, tmp_path, **wrong)


def test_a_model_that_draws_nothing_is_blocked(results, tmp_path, monkeypatch):
    def nothing(*args):
        raise FloatingPointError("drawn tokens: got NaN")

    monkeypatch.setattr(reference, "draw", nothing)
    assert blocked(results, PROSE, tmp_path, kind="calibration", tokens=30, generated=20) == "drawn tokens: got NaN"
