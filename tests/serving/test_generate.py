"""Generation on a bundle: the choice of tokens, text in pieces, the cache kept between prompts, and the program."""

import importlib
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import tinyrow
from graphs import Model
from kvgate.board.engine import EngineError
from kvgate.board.ort import Engine
from kvgate.checkpoint.reference import load_tokenizer
from kvgate.contract import Contract
from kvgate.serving import generate as program
from kvgate.serving.bundled import Bundle
from kvgate.serving.context import CANCELLED, LENGTH, STOP, Context, Options, Run
from kvgate.serving.sampling import pick
from kvgate.serving.text import BROKEN, Stops, Stream, Text, Unavailable, _compile
from kvgate.stages.trace import prompt_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GREEDY = Options()
STRATEGIES = ("cpu_managed", "dynamic_concat", "fixed_max_scatter", "fixed_max_blend")


@pytest.fixture(scope="module")
def text(bundle):
    return Bundle(bundle).text()


def context_of(folder, end_ids=(), engine=None) -> Context:
    """A context on a graph's folder."""
    contract = Contract.from_json((folder / "contract.json").read_text())
    half = importlib.import_module(f"kvgate.strategies.{contract.strategy}.host")
    made = engine or Engine({}, folder, contract)
    if engine is None:
        made.open(lambda phase: None)
    return Context(made, half.Host(contract, dict(np.load(folder / "host.npz")), -1e4), end_ids)


@pytest.fixture
def context(rows):
    return context_of(rows.graph)


def generated(context, ids, options=GREEDY, stopped=lambda: False) -> Run:
    run = Run(len(ids))
    assert list(context.generate(ids, options, run, stopped)) == run.tokens
    return run


# The next token


def test_greedy_takes_the_best_and_the_first_of_equals():
    assert pick(np.float32([1, 5, 5, 0]), GREEDY, lambda: 0.99) == 1


def test_draws_follow_the_probabilities():
    logits, rng = np.log(np.float32([0.5, 0.3, 0.2])), np.random.default_rng(0)
    drawn = np.bincount([pick(logits, Options(temperature=1), rng.random) for _ in range(20_000)]) / 20_000
    assert np.abs(drawn - [0.5, 0.3, 0.2]).max() < 0.02
    drawn = np.bincount([pick(logits, Options(temperature=0.5), rng.random) for _ in range(20_000)]) / 20_000
    assert np.abs(drawn - np.array([0.25, 0.09, 0.04]) / 0.38).max() < 0.02


def test_top_p_cuts_the_tail():
    logits = np.log(np.float32([0.2, 0.5, 0.3]))
    for share, allowed in ((0.0, {1}), (0.5, {1}), (0.51, {1, 2}), (0.8, {1, 2}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2})):
        options = Options(temperature=1, top_p=share)
        assert {pick(logits, options, lambda x=x: x) for x in np.linspace(0, 0.999, 50)} == allowed, share


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 2.0])
@pytest.mark.parametrize("draw", [0.0, np.nextafter(1, 0)])
def test_extreme_temperatures_and_draws(temperature, draw):
    token = pick(np.float32([-3e38, 2, 3e38, 1]), Options(temperature=temperature), lambda: draw)
    assert token == 2


def test_a_seed_gives_the_same_tokens(rows, context):
    runs = [generated(context, rows.prompt, Options(temperature=1.5, seed=s)).tokens for s in (1, 1, 2, 2**64 - 1)]
    assert runs[0] == runs[1] != runs[2]


# The context


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_reference_s_tokens(rows, strategy):
    graph = Model(rows.results, "tiny").export(strategy, capacity=tinyrow.CAPACITY)
    run = generated(context_of(graph.folder), rows.prompt, Options(max_tokens=len(rows.generated)))
    assert run.tokens == rows.generated and run.finish == LENGTH and run.reused == 0


def test_it_stops_at_the_full_cache(rows, context):
    run = generated(context, rows.prompt)
    assert run.finish == LENGTH and len(run.tokens) == tinyrow.CAPACITY - len(rows.prompt) + 1
    assert run.tokens[: len(rows.generated)] == rows.generated
    run = generated(context, (rows.prompt * 9)[: tinyrow.CAPACITY])
    assert (run.finish, len(run.tokens)) == (LENGTH, 1)


def test_it_stops_at_an_end_of_text_token(rows):
    end = rows.generated[4]
    run = generated(context_of(rows.graph, [end]), rows.prompt)
    assert run.finish == STOP and run.tokens == rows.generated[: rows.generated.index(end) + 1]


@pytest.mark.parametrize("ids", [[], [-1], [300], [5] * (tinyrow.CAPACITY + 1)])
def test_prompts_that_are_none(context, ids):
    with pytest.raises(ValueError, match="got"):
        generated(context, ids)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_prompts_have_in_common_is_kept_and_changes_nothing(rows, strategy):
    graph = Model(rows.results, "tiny").export(strategy, capacity=tinyrow.CAPACITY)
    context = context_of(graph.folder)
    first = generated(context, rows.prompt)
    for ids in (
        rows.prompt,
        rows.prompt + first.tokens[:5],
        [*rows.prompt[:7], 9, 8, 7],
        rows.prompt[:4],
        [11, *rows.prompt],
    ):
        fed = list(context.fed)
        common = next(
            (n for n, (a, b) in enumerate(zip(fed, ids[:-1], strict=False)) if a != b), min(len(fed), len(ids) - 1)
        )
        run, fresh = generated(context, ids), generated(context_of(graph.folder), ids)
        assert run.reused == common and fresh.reused == 0
        assert run.tokens == fresh.tokens
        again, anew = context.host.views, context_of(graph.folder)
        generated(anew, ids)
        for a, b in zip(again, anew.host.views, strict=True):
            assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])  # to the bit, the unused slots too


def test_a_strategy_that_keeps_slots_its_own_way_starts_over(rows):
    """hf_export pads on the left, recompute keeps tokens: their slots are not where the base says."""
    for module in ("hf_export", "recompute"):
        half = importlib.import_module(f"kvgate.strategies.{module}.host").Host
        assert not Context(None, object.__new__(half), ()).by_position
    assert context_of(rows.graph).by_position


class Failing:
    """An engine whose n-th step fails, raising or with logits that are no numbers."""

    def __init__(self, engine, at, nan=False):
        self.engine, self.at, self.nan, self.steps = engine, at, nan, 0

    def step(self, feeds):
        self.steps += 1
        outputs = self.engine.step(feeds)
        if self.steps != self.at:
            return outputs
        if self.nan:
            return outputs | {"logits": outputs["logits"] * np.float32("nan")}
        raise EngineError("hang", "it hangs")


@pytest.mark.parametrize("nan", [False, True])
def test_after_a_step_that_failed_it_starts_over(rows, context, nan):
    failing = context_of(rows.graph, engine=Failing(context.engine, 25, nan))
    with pytest.raises(EngineError, match="NaN or inf" if nan else "it hangs"):
        generated(failing, rows.prompt)
    run = generated(failing, rows.prompt, Options(max_tokens=12))
    assert run.tokens == rows.generated and run.reused == 0


def test_a_runtime_that_only_prints_its_failure_is_heeded(rows, context):
    def heed():
        raise EngineError("failed_to_submit", "the runtime said: failed to submit")

    context.heed = heed
    with pytest.raises(EngineError, match="failed to submit"):
        generated(context, rows.prompt)
    assert context.fed == []


def test_it_can_be_stopped_in_the_prompt_and_in_the_answer(rows, context):
    for steps in (5, len(rows.prompt) + 3):
        left = iter([False] * steps)
        run = generated(context, rows.prompt, stopped=lambda left=left: next(left, True))
        assert run.finish == CANCELLED and len(run.tokens) == max(0, steps - len(rows.prompt) + 1)
        context.fed = []


# Text in pieces


def pieces(decode, ids) -> list[str]:
    stream = Stream(decode)
    return [stream.push(x) for x in ids] + [stream.finish()]


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def llama_like():
    """Words with a leading mark for a space, single bytes for what no word has."""
    words = ["<unk>", "▁", "▁▁", "▁Hello", "▁world", "lo", "é", "▁é", "!", *(f"<0x{n:02X}>" for n in range(256))]
    made = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


WORDS = "naïve café, 漢字 and 👩‍👩‍👧 emoji 🇩🇪 \n\ttabs \u0301 ends"


def test_pieces_are_whole_characters_and_together_the_text():
    made = byte_level()
    ids = made.encode(WORDS).ids
    found = pieces(made.decode, ids)
    assert "".join(found) == WORDS
    assert not any(BROKEN in x for x in found)
    assert found[:3] == ["n", "a", ""]  # the first byte of a letter of two waits for the second


def test_bytes_that_are_no_text_come_out_as_the_whole_would():
    made, rng = byte_level(), np.random.default_rng(4)
    for _ in range(300):
        ids = rng.integers(0, 256, rng.integers(1, 40)).tolist()
        assert "".join(pieces(made.decode, ids)) == made.decode(ids)


def test_leading_spaces_of_words_are_kept_between_pieces_only():
    made = llama_like()
    smile = [made.token_to_id(f"<0x{n:02X}>") for n in "😀é".encode()]
    words = [made.token_to_id(x) for x in ("▁Hello", "▁world", "▁", "▁▁", "é", "▁é", "!", "▁Hello", "lo")]
    ids = words + smile + words[:2] + smile + [1, 2, 1] + words
    found = pieces(made.decode, ids)
    assert "".join(found) == made.decode(ids)
    assert found[:2] == ["Hello", " world"] and not any(BROKEN in x for x in found)
    assert "".join(pieces(made.decode, smile + smile)) == "😀é😀é"


def test_bytes_that_stay_broken_do_not_stop_the_text():
    made = llama_like()
    broken = [made.token_to_id("<0xFF>")] * 9
    found = pieces(made.decode, [3, *broken, 3, 4])
    assert "".join(found) == "Hello" + 9 * BROKEN + " Hello world"
    assert found[4] == BROKEN  # not held back to the end


def test_only_the_last_tokens_are_decoded_again():
    made, lengths = byte_level(), []

    def decode(ids):
        lengths.append(len(ids))
        return made.decode(list(ids))

    pieces(decode, made.encode("plain words " * 200).ids)
    assert max(lengths) <= 2


@pytest.mark.parametrize(
    ("stops", "given", "text", "stopped"),
    [
        ([], ["ab", "c"], "abc", False),
        (["x"], ["ab", "c"], "abc", False),
        (["bc"], ["ab", "cd"], "a", True),
        (["abd"], ["ab", "c"], "abc", False),
        (["cd", "bc"], ["a", "b", "c", "d"], "a", True),
        (["aab"], ["a", "a", "a", "b"], "a", True),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", True),
    ],
)
def test_stop_strings(stops, given, text, stopped):
    held, found, hit = Stops(stops), "", False
    for piece in given:
        more, hit = held.push(piece)
        found += more
        if hit:
            break
    assert (found + ("" if hit else held.held), hit) == (text, stopped)


# Prompts


@pytest.mark.parametrize(
    "said", ["Hi", " two  spaces ", "ünï 漢字 👍", "{{ 7 * 7 }} {% raw %}", "a\n\nb", "<b>&amp;</b>"]
)
def test_a_chat_is_the_trace_s_prompt(rows, text, said):
    tokenizer = load_tokenizer(rows.job("fetch", {}, []).folder)
    assert text.chat([{"role": "user", "content": said}]) == prompt_ids(tokenizer, said)


def test_half_a_surrogate_pair_is_refused(text):
    with pytest.raises(ValueError, match="surrogate"):
        text.chat([{"role": "user", "content": "\ud83d"}])


CONSTRUCTS = """\
{%- set ns = namespace(found=false) -%}
{{- bos_token }}
{% for m in messages %}
  {%- if loop.first and m['role'] != 'system' %}
System: none {{ {"a": [1, "ü<>"]} | tojson }}
  {%- endif %}
    {% if m.role == 'user' %}
[{{ m['content'].strip() | upper }}]
    {% elif m.role == 'assistant' %}
{% generation %}{{ m.content }}{% endgeneration %}
    {% else %}
        {% set ns.found = true %}
        {% continue %}
    {% endif %}
{% endfor %}
{% if ns.found %}has a system message{% endif %}
{% if tools is not none %}never{% endif %}{{ tools }} {{ missing }}
{% if add_generation_prompt %}Answer:{% endif %}
"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[:2]])
def test_templates_render_as_transformers_renders_them(rows, tmp_path, chat):
    tokenizer = load_tokenizer(rows.job("fetch", {}, []).folder)
    tokenizer.chat_template = CONSTRUCTS
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CONSTRUCTS)
    wanted = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert Text(tmp_path, dict(tokenizer.special_tokens_map)).chat(chat) == list(wanted)


def test_what_a_template_refuses_is_said_in_one_line(text, monkeypatch):
    monkeypatch.setattr(text, "template", _compile("{{ raise_exception('roles must\n alternate') }}"))
    with pytest.raises(ValueError, match=r"chat template refuses them: roles must alternate$"):
        text.chat(CHAT)
    monkeypatch.setattr(text, "template", _compile("{{ messages.append(1) }}"))
    with pytest.raises(ValueError, match="refuses them"):
        text.chat(CHAT)


def test_without_a_template_one_message_is_plain_text(text, monkeypatch):
    monkeypatch.setattr(text, "template", None)
    assert text.decode(text.chat([{"role": "user", "content": "Hi"}])) == "Hi"
    with pytest.raises(ValueError, match="no chat template"):
        text.chat(CHAT)


@pytest.mark.parametrize(
    ("package", "how"), [("tokenizers", "pip install tokenizers"), ("jinja2", "pip install jinja2")]
)
def test_a_missing_package_is_named(bundle, monkeypatch, package, how):
    for name in [x for x in sys.modules if x.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match=how) as caught:
        Bundle(bundle).text()
    assert "token ids work" in str(caught.value)


# The program


def test_the_text_is_the_trace_s(rows, bundle):
    ran = tinyrow.generate(bundle, "Hi", "--max-tokens", "12")
    assert (ran.returncode, ran.stdout) == (0, rows.trace["text"] + "\n")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--ids", "1,x"], 1, "--ids: got '1,x', allowed: whole numbers"),
        (["--ids", ""], 1, "prompt: got no tokens"),
        (["--ids", "1,900"], 1, "token id: got 900, allowed: 0 to 299"),
        (["x" * 60], 1, "prompt: got 79 tokens, allowed: at most 48"),
        ([" "], 1, "prompt: got an empty text"),
        (["Hi", "--ids", "1"], 2, "got a prompt and --ids"),
        (["Hi", "--temperature", "-1"], 2, "--temperature: got '-1', allowed: 0 to 2"),
        (["Hi", "--temperature", "nan"], 2, "--temperature: got 'nan', allowed: 0 to 2"),
        (["Hi", "--top-p", "2"], 2, "--top-p: got '2', allowed: 0 to 1"),
        (["Hi", "--max-tokens", "0"], 2, "--max-tokens: got '0', allowed: 1 or more"),
        (["Hi", "--seed", "x"], 2, "--seed: got 'x', allowed: 0 or more"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(bundle, words, code, said):
    ran = tinyrow.generate(bundle, *words)
    assert ran.returncode == code and ran.stdout == "" and said in ran.stderr.splitlines()[-1], ran.stderr
    assert "Traceback" not in ran.stderr


def test_help_helps(bundle):
    for name in ("generate.py", "serve.py"):
        said = tinyrow.generate(bundle, "--help", program=name).stdout
        assert all(x in said for x in ("--backend", "--graph", "--core-mask", "--bundle"))


def test_a_reader_that_has_had_enough_is_no_error(bundle):
    command = f"{sys.executable} -I {bundle / 'generate.py'} Hi | head -c 1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, env=tinyrow.bare())
    assert ran.returncode == 0 and b"Traceback" not in ran.stderr, ran


SLOW = """
import sys, time
sys.argv = ["generate.py", "Hi"]
from kvgate.board import ort
step = ort.Engine.step
def slow(self, feeds):
    time.sleep({seconds})
    {more}
    return step(self, feeds)
ort.Engine.step = slow
exec(open("generate.py").read().replace("__file__", "'generate.py'"))
"""


def slowed(bundle, more="pass", seconds=0.0):
    command = [sys.executable, "-c", SLOW.format(more=more, seconds=seconds)]
    return subprocess.Popen(
        command, cwd=bundle, env=tinyrow.bare() | {"PYTHONPATH": str(bundle), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=tinyrow.interruptible,
    )  # fmt: skip


def test_ctrl_c_ends_it(bundle):
    process = slowed(bundle, seconds=0.05)
    assert process.stdout.read(1)  # tokens come as they are made
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in said, said


def test_what_a_runtime_prints_does_not_get_into_the_text(rows, bundle):
    noise = "print('noise'); import os; os.write(1, b'more'); os.write(2, b'W RKNN: a warning\\n')"
    out, said = slowed(bundle, noise).communicate(timeout=60)
    assert out.startswith(rows.trace["text"]) and "noise" not in out + said and "warning" not in said


@pytest.mark.parametrize(
    ("line", "wanted"),
    [("E RKNN: failed to submit!, op id: 3", "failed to submit"), ("E RKNN: [12:00] timeout", "timeout")],
)
def test_an_error_that_a_runtime_only_prints_ends_it(bundle, line, wanted):
    """Through the C library's buffer, too, as the runtime's own lines may come."""
    for print_it in ("os.write(2, {!r})", "import ctypes; ctypes.CDLL(None).printf({!r})"):
        _, said = slowed(bundle, "import os; " + print_it.format(line.encode() + b"\n")).communicate(timeout=60)
        assert said.startswith("generate: the runtime said: ") and wanted in said and said.count("\n") == 1, said


def test_memory_stays_flat(rows, context):
    """Over 10,000 steps."""
    import resource

    generated(context, rows.prompt)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = 0
    while steps < 10_000:
        context.fed = []
        steps += len(rows.prompt) + len(generated(context, rows.prompt).tokens)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


def test_the_facts_are_json(bundle):
    assert json.loads((bundle / "bundle.json").read_text())["version"] == 2
    assert program.summary(Run(5, 0, [1], LENGTH, 0.5, 0.001)) == "5 + 1 tokens (length): the first after 0.50 s"
