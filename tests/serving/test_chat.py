"""Requests of OpenAI's routes: what is taken, what is refused, and the forms of answers."""

import json

import pytest
from kvgate.serving import answers, chat
from kvgate.serving.context import LENGTH, STOP, Run
from kvgate.serving.fields import Bad
from kvgate.serving.sampling import Logprob, Options

HI = [{"role": "user", "content": "Hi"}]
HEAD = {"id": "x", "created": 1, "model": "tiny", "system_fingerprint": "f"}


def parse(**fields):
    return chat.parse(json.dumps({"messages": HI, **fields}).encode(), ["tiny", "gpt-4o"])


def completion(**fields):
    return chat.parse_completion(json.dumps({"prompt": "Hi", **fields}).encode(), ["tiny"])


NOTHING = [
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tool_choice": "none", "parallel_tool_calls": False},
    {"functions": [], "function_call": "auto"},
    {"function_call": "none"},
    {"top_logprobs": 0, "logprobs": False},
    {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"},
    {"reasoning_effort": "none"},
    {"max_tokens": -1},
    {"max_completion_tokens": -1},
    {"cache_prompt": True},
    {"cache_prompt": False, "id_slot": -1, "timings_per_token": True},
    {"stream_options": {}},
    {"stream_options": {"include_usage": False}},
    {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}},
    {"n": 1, "best_of": 1, "ignore_eos": False, "min_tokens": 0, "length_penalty": 1.0},
    {"top_k": 0, "min_p": 0, "repeat_penalty": 1.0, "repeat_last_n": 64, "typical_p": 1, "mirostat": 0},
    {"top_k": -1, "repetition_penalty": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}},
    {"dry_multiplier": 0, "dry_base": 1.75, "xtc_probability": 0, "xtc_threshold": 0.1, "dynatemp_range": 0},
    {"top_n_sigma": -1.0, "min_keep": 0, "n_keep": 0, "n_predict": -1, "n_probs": 0, "lora": [], "penalize_nl": False},
    {"skip_special_tokens": True, "stop_token_ids": [], "include_stop_str_in_output": False, "echo": False},
    {"add_special_tokens": False, "prediction": {"type": "content", "content": "x"}},
    {"model": ""},
    {"model": "gpt-4o"},
    {"user": "me", "metadata": {"a": "b"}, "tools": None, "stop": None, "seed": None, "grammar": ""},
]


@pytest.mark.parametrize("fields", NOTHING, ids=lambda x: " ".join(x))
def test_what_asks_for_nothing_is_taken_and_changes_nothing(fields):
    found = parse(**fields)
    assert (found.messages, found.options, found.stops, found.usage, found.answers) == (HI, Options(), [], False, 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "x"}}, "function_call"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"mirostat": 2}, "mirostat"),
        ({"top_n_sigma": 1}, "top_n_sigma"),
        ({"stop_token_ids": [7]}, "stop_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.01}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"more": 1}}, "stream_options"),
        ({"echo": True}, "echo"),
        ({"beam_width": 4}, "beam_width"),
        ({"model": "gpt-9"}, "model"),
        ({"model": ["tiny"]}, "model"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_its_name(fields, param):
    with pytest.raises(Bad) as caught:
        parse(**fields)
    error = caught.value
    assert error.param == param and param in error.text and "\n" not in error.text and len(error.text) < 250
    assert error.status == (404 if param == "model" else 400)


def test_what_is_asked_for_is_what_the_options_say():
    found = parse(
        top_k=40, min_p=0.05, repeat_penalty=1.1, repeat_last_n=-1, presence_penalty=0.5, frequency_penalty=-1,
        logit_bias={"7": -100, "8": 2.5}, logprobs=True, top_logprobs=3, n=3, seed=-1, max_tokens=9,
        max_completion_tokens=5, temperature=1, top_p=0.9, stop="x", stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    bias = {7: -100.0, 8: 2.5}
    assert found.options == Options(5, 1.0, 0.9, 2**64 - 1, 40, 0.05, 1.1, 0.5, -1.0, bias, 3)
    assert (found.answers, found.stops, found.stream, found.usage, found.model) == (3, ["x"], True, True, "tiny")
    assert [found.option(n).seed for n in range(3)] == [2**64 - 1, 0, 1]
    assert found.option(2).top_k == 40
    assert parse(logprobs=True).options.logprobs == 0 and parse(repetition_penalty=2).options.repetition == 2


def test_usual_values_stand_where_a_request_says_nothing():
    usual = Options(7, 0.5, 0.9, 3, 40, 0.1, 1.2, 0.1, 0.2, {1: 1.0})
    assert chat.parse(json.dumps({"messages": HI}).encode(), ["tiny"], usual).options == usual
    body = {"messages": HI, "temperature": 0, "max_tokens": -1, "top_k": 0}
    found = chat.parse(json.dumps(body).encode(), ["tiny"], usual).options
    assert (found.temperature, found.max_tokens, found.top_k, found.min_p) == (0, None, 0, 0.1)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "function_call": None},
        {"role": "assistant", "content": None, "annotations": [], "audio": None, "reasoning_content": ""},
    ],
)
def test_an_assistant_that_said_nothing(message):
    found = parse(messages=[*HI, message, *HI])
    assert found.messages == [*HI, {"role": "assistant", "content": ""}, *HI]


@pytest.mark.parametrize("content", [None, [], 7])
def test_a_user_says_something(content):
    with pytest.raises(Bad, match=r"messages\[0\].content"):
        parse(messages=[{"role": "user", "content": content}])


def test_a_developer_is_the_system():
    found = parse(messages=[{"role": "developer", "content": "Be brief."}, *HI])
    assert found.messages == [{"role": "system", "content": "Be brief."}, *HI]
    with pytest.raises(Bad, match="tool"):
        parse(messages=[*HI, {"role": "tool", "content": "x", "tool_call_id": "1"}])


# The completions route


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("Hi", "Hi"), (["Hi"], "Hi"), ([1, 2], [1, 2]), ([5], [5]), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_a_text_or_ids(prompt, wanted):
    found = completion(prompt=prompt)
    assert found.prompt == wanted and found.messages == [] and found.options == Options(max_tokens=16)


def test_what_a_completion_may_ask_for():
    found = completion(
        n=2, best_of=2, echo=False, add_special_tokens=True, suffix="", logprobs=2, max_tokens=-1, stop=["a"], top_k=3
    )
    assert found.answers == 2 and found.options == Options(top_k=3, logprobs=2) and found.stops == ["a"]
    assert completion(suffix=None, logprobs=None).options.logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": HI}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_what_a_completion_may_not_ask_for(fields, param):
    with pytest.raises(Bad) as caught:
        completion(**fields)
    assert caught.value.param == param and param in caught.value.text


# Answers


def name(token):
    return {1: ("a", b"a"), 2: ("\ufffd", b"\xc3"), 3: ("bc", b"bc"), 4: ("\ufffd", b"\xe2\x82")}[token]


TOKENS = [Logprob(1, -0.5, ((1, -0.5), (3, -1.5))), Logprob(2, -2.0, ((4, -1.0), (2, -2.0))), Logprob(3, -0.25)]


def test_log_probabilities_are_in_openai_s_form():
    found = answers.chat_logprobs(TOKENS, name)
    assert found["content"][0] == {
        "token": "a", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "bc", "logprob": -1.5, "bytes": [98, 99]},
        ],
    }  # fmt: skip
    assert found["content"][1] == {
        "token": "\ufffd", "logprob": -2.0, "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xE2, 0x82]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3]},
        ],
    }  # fmt: skip
    assert answers.completion_logprobs(TOKENS, name, 10) == {
        "tokens": ["a", r"bytes:\xc3", "bc"],
        "token_logprobs": [-0.5, -2.0, -0.25],
        "top_logprobs": [{"a": -0.5, "bc": -1.5}, {r"bytes:\xe2\x82": -1.0, r"bytes:\xc3": -2.0}, {}],
        "text_offset": [10, 11, 12],
    }


def test_openai_s_own_types_take_the_answers():
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    runs = [Run(5, 4, [1, 2], LENGTH), Run(5, 4, [3], STOP)]
    told = answers.chat_logprobs(TOKENS, name)
    body = answers.chat([answers.Choice(runs[0], "a", told), answers.Choice(runs[1], "bc")], HEAD)
    found = ChatCompletion.model_validate(body, strict=True)
    assert [(x.index, x.message.content, x.finish_reason) for x in found.choices] == [
        (0, "a", "length"),
        (1, "bc", "stop"),
    ]
    assert found.choices[0].logprobs.content[0].top_logprobs[1].bytes == [98, 99]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, 3, 8)
    assert found.usage.prompt_tokens_details.cached_tokens == 4
    chunk = ChatCompletionChunk.model_validate(
        answers.chunk(HEAD, {"content": "a"}, index=1, logprobs=told), strict=True
    )
    assert (chunk.choices[0].index, chunk.choices[0].delta.content) == (1, "a")
    told = answers.completion_logprobs(TOKENS, name)
    whole = Completion.model_validate(answers.completion([answers.Choice(runs[0], "a", told)], HEAD), strict=True)
    assert whole.choices[0].text == "a" and whole.choices[0].logprobs.text_offset == [0, 1, 2]
    piece = answers.completion_chunk(HEAD, "a", "stop", 1)
    assert piece["choices"] == [{"text": "a", "index": 1, "logprobs": None, "finish_reason": "stop"}]
