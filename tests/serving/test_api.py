"""What the routes answer: streams that are alive while they wait, health, measures, names."""

import http.client
import json
import re
import time

import openai
import pytest
from kvgate.serving import transport
from kvgate.serving.context import Run
from kvgate.serving.measures import Measures, timings
from kvgate.serving.sampling import Options
from served import HI, ROUTE, Served, wait_for


def events(text):
    """The events of a stream: comments as they are, data as JSON where it is that."""
    found = []
    for event in text.split("\n\n")[:-1]:
        data = event.removeprefix("data: ")
        found.append(json.loads(data) if data.startswith("{") else data)
    return found


def until(connection, wanted):
    data = b""
    while wanted not in data:
        more = connection.recv(4096)
        assert more, data
        data += more
    return data.decode()


# Streams


def test_a_stream_begins_at_once_and_is_alive_while_it_waits(bundle, rows):
    with Served(bundle, beat=0.05) as served:
        served.engine.go.clear()
        first = served.raw(stream=True, max_tokens=12)
        head = until(first, b": waiting\n\n")  # no step was made
        assert served.engine.steps == 0
        assert head.startswith("HTTP/1.1 200 ") and "\r\nX-Accel-Buffering: no\r\n" in head
        assert "\r\nContent-Type: text/event-stream" in head and '"role": "assistant"' in head
        second = served.raw(stream=True, max_tokens=12)
        until(second, b": waiting\n\n")  # in the queue
        assert served.worker.length == 2
        served.engine.go.set()
        for connection in (first, second):
            rest = until(connection, b"0\r\n\r\n")
            assert "data: [DONE]\n\n" in rest
            text = "".join(re.findall(r'"delta": {"content": (".*?")}', rest))
            assert "".join(json.loads(x) for x in re.findall(r'".*?(?<!\\)"', text)) == rows.trace["text"]


def test_the_openai_client_reads_over_the_comments(bundle, rows, monkeypatch):
    monkeypatch.setattr("kvgate.serving.api._LOOK", 0.01)
    with Served(bundle, beat=0.0) as served:  # one at each look
        served.engine.seconds = 0.02
        chunks = list(served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == rows.trace["text"]


def test_what_is_known_before_has_its_status_in_a_stream_too(served):
    served.engine.go.clear()
    for body, wanted in (
        ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, 400),
        ({"messages": HI, "model": "other"}, 404),
    ):
        status, headers, _ = served.ask(body={**body, "stream": True})
        assert status == wanted and headers["Content-Type"] == "application/json"
    made = []
    for n in range(3):
        made.append(served.raw(stream=True))
        wait_for(lambda n=n: served.worker.length == n + 1)
    status, headers, answer = served.ask(body={"messages": HI, "stream": True})
    assert status == 429 and headers["Retry-After"] and answer["error"]["code"] == "rate_limit_exceeded"
    for connection in made:
        connection.close()
    served.engine.go.set()
    served.idle()


def test_an_error_before_the_first_token_is_an_event_and_the_end(served):
    served.engine.fails = True
    status, headers, data = served.ask(body={"messages": HI, "stream": True})
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    first, last = events(data.decode())
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["error"]["message"] == "the model failed: the NPU is gone" and last["error"]["type"] == "server_error"
    with pytest.raises(openai.APIError, match="the NPU is gone"):
        list(served.client.chat.completions.create(model="tiny", messages=HI, stream=True))


def test_a_client_that_leaves_the_queue_of_streams_frees_its_place(served):
    served.engine.go.clear()
    first, second = served.raw(stream=True), None
    wait_for(lambda: served.worker.length == 1)
    second = served.raw(stream=True)
    wait_for(lambda: served.worker.length == 2)
    second.close()
    wait_for(lambda: served.worker.length == 1)
    first.close()
    served.engine.go.set()
    served.idle()


def test_the_engine_is_opened_stepped_and_closed_in_one_thread(bundle):
    with Served(bundle) as served:
        for _ in range(3):
            served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=2)
        list(served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=2, stream=True))
    assert served.engine.closed and len(served.engine.threads) == 1
    assert served.engine.threads == {served.worker._thread.ident}


# Health and measures


def test_health_under_both_names_while_all_is_full(served):
    served.engine.go.clear()
    made = []
    for n in range(3):
        made.append(served.raw())
        wait_for(lambda n=n: served.worker.length == n + 1)
    made += [served.connect() for _ in range(2 * transport.SPARE)]
    for path in ("/health", "/healthz", "/health?verbose=1"):
        status, _, answer = served.ask("GET", path)
        assert status == 200 and answer == {"status": "ok", "model": "tiny", "busy": True, "waiting": 2}
    for connection in made:
        connection.close()
    served.engine.go.set()


def test_metrics_count_what_was_done(served):
    for _ in range(2):
        served.ask(body={"messages": HI, "max_tokens": 12})
    served.ask(body={})
    served.ask("GET", "/nothing")
    served.ask("GET", "/health")
    status, headers, data = served.ask("GET", "/metrics")
    assert status == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = data.decode().splitlines()
    values = dict(x.rsplit(" ", 1) for x in lines if not x.startswith("#"))
    assert values[f'kvgate_requests_total{{route="{ROUTE}",status="200"}}'] == "2"
    assert values[f'kvgate_requests_total{{route="{ROUTE}",status="400"}}'] == "1"
    assert values['kvgate_requests_total{route="other",status="404"}'] == "1"
    assert values['kvgate_requests_total{route="/health",status="200"}'] == "1"
    counts = {"prompt_tokens_total": "42", "reused_tokens_total": "20", "generated_tokens_total": "24"}
    gauges = {"requests_running": "0", "requests_waiting": "0", "queue_limit": "2"}
    for name, value in {**counts, **gauges}.items():
        assert values["kvgate_" + name] == value, name
    assert float(values["kvgate_prompt_seconds_total"]) > 0 and float(values["kvgate_generation_seconds_total"]) > 0
    names = [x.split()[2] for x in lines if x.startswith("# TYPE ")]
    assert len(names) == len(set(names)) == 9 and {x.split("{")[0] for x in values} == set(names)


def test_metrics_of_labels_that_a_client_chose_stay_few(served):
    for n in range(5):
        served.ask("GET", f"/x{n}")
    data = served.ask("GET", "/metrics")[2].decode()
    assert 'route="other",status="404"} 5' in data and "/x" not in data


def test_a_generation_that_fails_is_counted_as_far_as_it_came():
    made = Measures()
    made.generation(Run(prompt=5, reused=2, tokens=[1, 2], first_seconds=0.5, seconds=0.25))
    text = made.text({"requests_running": 1, "requests_waiting": 3, "queue_limit": 8})
    for line in ("prompt_tokens_total 5", "reused_tokens_total 2", "prompt_seconds_total 0.5", "requests_waiting 3"):
        assert f"\nkvgate_{line}\n" in text


def test_timings_have_llama_cpp_s_names():
    run = Run(prompt=20, reused=4, tokens=[1, 2, 3], first_seconds=0.8, seconds=0.1)
    assert timings([run]) == {
        "cache_n": 4,
        "prompt_n": 16,
        "prompt_ms": 800.0,
        "prompt_per_second": 20.0,
        "predicted_n": 3,
        "predicted_ms": 100.0,
        "predicted_per_second": 20.0,
    }
    assert timings([Run(prompt=1, tokens=[1])])["predicted_per_second"] == 0.0


def test_answers_have_their_timings(served):
    served.engine.seconds = 0.002
    answer = served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=12)
    assert answer.timings["prompt_n"] == 21 and answer.timings["predicted_n"] == 12
    assert answer.timings["prompt_ms"] >= 42 and answer.timings["predicted_ms"] >= 22
    last = list(served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, stream=True))[-1]
    assert last.choices[0].finish_reason == "length" and (last.timings["cache_n"], last.timings["prompt_n"]) == (20, 1)


def test_a_body_in_chunks_is_a_body(served, rows):
    def parts():
        data = json.dumps({"messages": HI, "max_tokens": 12}).encode()
        for n in range(0, len(data), 7):
            yield data[n : n + 7]

    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    for _ in range(2):  # and the connection goes on
        connection.request("POST", ROUTE, parts(), {"Content-Type": "application/json"}, encode_chunked=True)
        answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["message"]["content"] == rows.trace["text"]
    connection.close()
    with served.connect() as raw:
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
        answer = raw.makefile("rb").read()
        assert b" 400 " in answer and b"hexadecimal" in answer


def test_an_upload_that_asks_first_is_told_to_go_on(served):
    data = json.dumps({"messages": HI, "max_tokens": 1}).encode()
    with served.connect() as raw:
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        raw.sendall(f"{head}Content-Length: {len(data)}\r\nExpect: 100-continue\r\n\r\n".encode())
        file = raw.makefile("rb")
        assert file.readline() == b"HTTP/1.1 100 Continue\r\n"
        time.sleep(0.05)
        raw.sendall(data)
        assert b"HTTP/1.1 200 OK" in file.read()


# Several answers, log probabilities


def test_several_answers_are_drawn_each_by_its_own_seed(served):
    options = {"model": "tiny", "messages": HI, "temperature": 1.7, "max_tokens": 8}
    answer = served.client.chat.completions.create(n=3, seed=7, **options)
    texts = [c.message.content for c in answer.choices]
    assert [c.index for c in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    for n, text in enumerate(texts):
        alone = served.client.chat.completions.create(seed=7 + n, **options)
        assert alone.choices[0].message.content == text
    assert answer.usage.prompt_tokens == 21 and answer.usage.completion_tokens == 24
    assert answer.timings["predicted_n"] == 24 and answer.timings["prompt_n"] == 23  # the last token, each time anew
    parts, ends = ["", "", ""], []
    for chunk in served.client.chat.completions.create(n=3, seed=7, stream=True, **options):
        (choice,) = chunk.choices
        parts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.append((choice.index, choice.finish_reason))
    assert parts == texts and ends == [(0, "length"), (1, "length"), (2, "length")]


def test_log_probabilities_of_a_stream_are_those_of_the_whole(served):
    options = {"model": "tiny", "messages": HI, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    whole = served.client.chat.completions.create(**options).choices[0]
    told = whole.logprobs.content
    assert len(told) == 12 and all(len(x.top_logprobs) == 2 for x in told)
    for x in told:  # greedy: the best one was taken
        assert x.logprob == x.top_logprobs[0].logprob <= 0 and x.token == x.top_logprobs[0].token
    assert b"".join(bytes(x.bytes) for x in told).decode("utf-8", "replace") == whole.message.content
    parts = []
    for chunk in served.client.chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs:
            parts += chunk.choices[0].logprobs.content
    assert parts == told
    assert served.client.chat.completions.create(model="tiny", messages=HI, max_tokens=1).choices[0].logprobs is None


def test_sampling_s_fields_reach_the_sampler(served):
    client = served.client
    options = {"model": "tiny", "messages": HI, "max_tokens": 4}
    usual = client.chat.completions.create(**options, logprobs=True).choices[0]
    first = client.chat.completions.create(**options, logit_bias={"77": 100}, logprobs=True).choices[0]
    assert len({x.token for x in first.logprobs.content}) == 1 and first.message != usual.message
    best = client.chat.completions.create(**options, temperature=2, extra_body={"top_k": 1}).choices[0]
    assert best.message == usual.message
    status, _, answer = served.ask(body={"messages": HI, "logit_bias": {"99999": 1}})
    assert status == 400 and answer["error"]["param"] == "logit_bias"


def test_what_the_command_line_says_holds_where_a_request_does_not(bundle):
    with Served(bundle, usual=Options(max_tokens=3, temperature=1.7, seed=5)) as served:
        first = served.client.chat.completions.create(model="tiny", messages=HI)
        asked = {"max_tokens": 3, "temperature": 1.7, "seed": 5}
        again = served.client.chat.completions.create(model="tiny", messages=HI, **asked)
        greedy = served.client.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=4)
        assert first.choices == again.choices and first.usage.completion_tokens == 3
        assert greedy.usage.completion_tokens == 4 and greedy.choices[0].message != first.choices[0].message


# Completions


def test_a_completion_goes_on_with_the_text_as_it_is(served, rows):
    raw = "<|start|>user\nHi<|end|>\n"
    client = served.client
    prompt = served.ask(path="/tokenize", body={"messages": HI})[2]["tokens"]
    assert prompt == rows.prompt
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12)
    assert answer.choices[0].text == rows.trace["text"] and answer.object == "text_completion"
    assert answer.id.startswith("cmpl-") and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 12)
    assert answer.timings["predicted_n"] == 12
    ids = served.ask(path="/tokenize", body={"content": raw, "add_special": True})[2]["tokens"]
    by_text, by_ids = (client.completions.create(model="tiny", prompt=x, max_tokens=6) for x in (raw, [ids]))
    assert by_text.choices == by_ids.choices and by_text.usage.prompt_tokens == len(ids)
    assert client.completions.create(model="tiny", prompt="Hi").usage.completion_tokens == 16  # OpenAI's default


def test_a_completion_streams(served, rows):
    options = {"model": "tiny", "prompt": rows.prompt, "max_tokens": 12, "logprobs": 1}
    whole = served.client.completions.create(**options).choices[0]
    assert whole.text == rows.trace["text"] and len(whole.logprobs.tokens) == 12
    chunks = list(served.client.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.text
    assert chunks[-1].usage.completion_tokens == 12 and chunks[-2].choices[0].finish_reason == "length"
    told = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for part in told for x in getattr(part, name)] == getattr(whole.logprobs, name), name


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "one text or one list"),
        ({"prompt": ["a", "b"]}, "prompt", "one text"),
        ({"prompt": [300]}, "prompt", "token id: got 300"),
        ({"prompt": [-1]}, "prompt", "token id: got -1"),
        ({"prompt": "x" * 99}, "prompt", "maximum context length is 48 tokens"),
        (b'{"prompt": "\\ud83d"}', "prompt", "surrogate"),
        ({"prompt": "a", "echo": True}, "echo", "got true"),
        ({"prompt": "a", "suffix": "b"}, "suffix", 'got "b"'),
        ({"prompt": "a", "messages": HI}, "messages", "does not know"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "got 0"),
    ],
)
def test_completions_that_are_refused(served, body, param, said):
    status, _, answer = served.ask(path="/v1/completions", body=body)
    assert status == 400 and answer["error"]["param"] == param and said in answer["error"]["message"]
    assert served.engine.steps == 0


# Tokens


def test_tokens_of_a_text_and_back(served, rows):
    for text in ("Hi there", "漢字 🙂\n", "<|start|>user\n"):
        status, _, found = served.ask(path="/tokenize", body={"content": text})
        assert status == 200 and found["count"] == len(found["tokens"]) > 0
        assert served.ask(path="/detokenize", body={"tokens": found["tokens"]})[2] == {"content": text}
    plain = served.ask(path="/tokenize", body={"content": "Hi"})[2]["tokens"]
    special = served.ask(path="/tokenize", body={"content": "Hi", "add_special": True, "model": "x"})[2]["tokens"]
    assert special[-len(plain) :] == plain
    assert served.ask(path="/tokenize", body={"messages": HI})[2] == {"tokens": rows.prompt, "count": 21}
    assert served.ask(path="/tokenize", body={"messages": [{"role": "user", "content": "x" * 99}]})[2]["count"] == 118
    assert served.ask(path="/detokenize", body={"tokens": []})[2] == {"content": ""}
    assert served.engine.steps == 0


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "content: got null"),
        ("/tokenize", {"content": 7}, "content: got 7"),
        ("/tokenize", b'{"content": "\\ud83d"}', "surrogate"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"content": "a", "with": 1}, "does not know"),
        ("/tokenize", {"messages": "a"}, "messages"),
        ("/detokenize", {}, "tokens: got null"),
        ("/detokenize", {"tokens": ["a"]}, 'tokens: got "a"'),
        ("/detokenize", {"tokens": [True]}, "tokens: got true"),
        ("/detokenize", {"tokens": [-1]}, "tokens: got -1"),
        ("/detokenize", {"tokens": [10**30]}, "allowed: 0 to "),
    ],
)
def test_tokens_that_are_refused(served, path, body, said):
    status, _, answer = served.ask(path=path, body=body)
    assert status == 400 and said in answer["error"]["message"]


# Names


def test_aliases_are_the_model(bundle):
    with Served(bundle, aliases=("gpt-4o", "org/model", "tiny")) as served:
        assert [x.id for x in served.client.models.list().data] == ["tiny", "gpt-4o", "org/model"]
        assert served.client.models.retrieve("org/model").id == "org/model"
        for name in ("tiny", "gpt-4o", "org/model"):
            answer = served.client.chat.completions.create(model=name, messages=HI, max_tokens=1)
            assert answer.model == name
        assert served.ask(body={"messages": HI, "max_tokens": 1})[2]["model"] == "tiny"
        with pytest.raises(openai.NotFoundError, match="allowed: tiny, gpt-4o, org/model"):
            served.client.chat.completions.create(model="other", messages=HI)
