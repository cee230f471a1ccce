"""Names of this machine, pages of other origins, keys."""

import openai
import pytest
from kvgate.serving.access import Access, keys, origin
from kvgate.serving.fields import Bad
from served import HI, ROUTE, Served

PAGE = "http://localhost:3000"
BODY = {"messages": HI, "max_tokens": 1}
CORS = "Access-Control-Allow-Origin"


def preflight(served, origin=PAGE, path=ROUTE, headers="authorization, content-type, x-stainless-os", **more):
    return served.ask(
        "OPTIONS",
        path,
        Origin=origin,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers=headers,
        **more,
    )


# Pages


@pytest.mark.parametrize("page", [PAGE, "https://evil.example", "null", "http://127.0.0.1:1", "file://", ""])
def test_a_page_of_another_origin_is_refused(served, page):
    for method, path in (("POST", ROUTE), ("GET", "/v1/models"), ("GET", "/health"), ("OPTIONS", ROUTE)):
        status, headers, _ = served.ask(method, path, body=BODY if method == "POST" else None, Origin=page)
        assert status == 403 and CORS not in headers
    assert served.engine.steps == 0


def test_a_page_that_posts_a_blob_without_a_type_is_refused(served):
    with served.connect() as connection:
        data = b'{"messages": [{"role": "user", "content": "Hi"}]}'
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost:{served.port}\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        assert b" 415 " in connection.makefile("rb").read()
    assert served.engine.steps == 0


def test_the_server_s_own_origin_is_none_of_others(served):
    own = f"http://127.0.0.1:{served.port}"
    assert served.ask(body=BODY, Origin=own)[0] == 200
    assert served.ask(body=BODY, Origin="http://evil.example", Host="evil.example")[0] == 403


def test_an_allowed_origin_reads_answers_errors_and_streams(bundle):
    with Served(bundle, origins=(PAGE,)) as served:
        status, headers, _ = preflight(served)
        assert status == 204 and headers[CORS] == PAGE and "Content-Length" not in headers
        assert headers["Access-Control-Allow-Headers"] == "authorization, content-type, x-stainless-os"
        assert headers["Access-Control-Allow-Methods"] == headers["Allow"] == "POST, OPTIONS"
        for body, wanted in ((BODY, 200), ({}, 400), ({**BODY, "stream": True}, 200)):
            status, headers, _ = served.ask(body=body, Origin=PAGE)
            assert (status, headers[CORS], headers["Vary"]) == (wanted, PAGE, "Origin")
        for method, path, wanted in (("GET", "/nothing", 404), ("PUT", ROUTE, 405), ("GET", "/health", 200)):
            status, headers, _ = served.ask(method, path, Origin=PAGE)
            assert (status, headers[CORS]) == (wanted, PAGE)
        with served.connect() as connection:  # what the standard library refuses by itself
            connection.sendall(f"GET /health HTTP/1.1\r\nOrigin: {PAGE}\r\n".encode() + b"X: y\r\n" * 200 + b"\r\n")
            assert b" 431 " in connection.makefile("rb").read()
        assert preflight(served, "http://evil.example")[0] == 403
        status, headers, _ = served.ask(body=BODY)  # no page at all
        assert status == 200 and CORS not in headers and headers["Vary"] == "Origin"


def test_all_origins(bundle):
    with Served(bundle, origins=("*",)) as served:
        for page in (PAGE, "null", "https://evil.example"):
            assert preflight(served, page)[1][CORS] == page
            assert served.ask(body=BODY, Origin=page)[::2][0] == 200
        assert served.ask(body=BODY, Origin=PAGE, Host="evil.example")[0] == 403  # the name is another matter


def test_preflights_of_all_kinds(bundle):
    with Served(bundle, origins=(PAGE,)) as served:
        assert preflight(served, path="/v1/models")[1]["Allow"] == "GET, HEAD, OPTIONS"
        assert preflight(served, path="/nothing")[0] == 404
        assert preflight(served, headers="x\x01y")[1]["Access-Control-Allow-Headers"] == "Authorization, Content-Type"
        private = preflight(served, Access_Control_Request_Private_Network="true")[1]
        assert private["Access-Control-Allow-Private-Network"] == "true"
        status, headers, _ = served.ask("OPTIONS", ROUTE)
        assert status == 204 and headers["Allow"] == "POST, OPTIONS" and CORS not in headers


@pytest.mark.parametrize("text", ["http://a/", "localhost:3000", "", "http://", "a b"])
def test_origins_that_are_none(text):
    with pytest.raises(ValueError, match=r"--allow-origin: got .* allowed: "):
        origin(text)


def test_origins_are_compared_without_case():
    assert origin("HTTP://Localhost:3000") == PAGE and origin("*") == "*" and origin("null") == "null"


# Names


def test_names_of_this_machine(bundle):
    with Served(bundle, hosts=("board.lan",)) as served:
        for name in ("board.lan", "Board.LAN:8000", "localhost.", "127.0.0.2:80", "[::1]", "[::1]:8000"):
            assert served.ask("GET", "/v1/models", Host=name)[0] == 200, name
        for name in ("evil.example", "board.lan.evil.example", "10.0.0.1", "localhost.evil.example:80", "[::2]:80"):
            status, _, answer = served.ask("GET", "/v1/models", Host=name)
            assert status == 403 and "--allow-host" in answer["error"]["message"], name


def test_on_an_address_of_the_network_any_name_may_ask_but_no_page():
    rules = Access()
    rules.check({"Host": "board.lan:8000"}, local=False)
    rules.check({"Host": "10.0.0.5:8000", "Origin": "http://10.0.0.5:8000"}, local=False)
    with pytest.raises(Bad, match="Origin"):  # a page whose own name was made to mean this machine
        rules.check({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, local=False)
    Access(hosts=("board.lan",)).check({"Host": "board.lan", "Origin": "https://board.lan"}, local=False)


# Keys


def test_a_key_is_asked_for(bundle):
    with Served(bundle, keys=("sesame", "other"), origins=(PAGE,)) as served:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": "sesame"},
            {"Authorization": "Basic sesame"},
            {"Authorization": "Bearer sesam"},
            {"Authorization": "Bearer sesame2"},
            {"Authorization": "Bearer s\xe9same"},
        ):
            for method, path in (("POST", ROUTE), ("GET", "/v1/models"), ("GET", "/metrics")):
                body = BODY if method == "POST" else None
                status, found, answer = served.ask(method, path, body, **headers)
                assert status == 401 and found["WWW-Authenticate"] == "Bearer"
                error = answer["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "sesam" not in str(answer)
        assert served.engine.steps == 0
        for key in ("Bearer sesame", "bearer other", "BEARER  sesame "):
            assert served.ask(body=BODY, Authorization=key)[0] == 200
        assert served.ask(body=BODY, Origin=PAGE)[1][CORS] == PAGE  # a page can read that it needs one
        assert preflight(served)[0] == 204  # a browser asks without it
        assert served.ask("GET", "/health")[0] == served.ask("GET", "/healthz")[0] == 200
        assert not [x for x in served.terminal.said if "sesam" in x or "Bearer w" in x]


def test_the_openai_client_has_its_key(bundle):
    with Served(bundle, keys=("none",)) as served:
        assert served.client.models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError) as caught:
            served.client.with_options(api_key="wrong").chat.completions.create(model="tiny", messages=HI)
        assert caught.value.code == "invalid_api_key"


def test_a_body_is_not_read_before_the_key(bundle):
    with Served(bundle, keys=("sesame",)) as served, served.connect() as connection:
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert b"HTTP/1.1 401 " in connection.makefile("rb").readline()


def test_keys_of_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\r\n\n  two \n")
    assert keys(["zero"], [file]) == ("zero", "one", "two")
    assert "zero" not in repr(Access(keys=("zero",)))


def test_keys_that_are_none(tmp_path):
    empty, binary, spaced = tmp_path / "empty", tmp_path / "binary", tmp_path / "spaced"
    empty.write_text("\n \n")
    binary.write_bytes(b"\xff\xfe")
    spaced.write_text("two words\n")
    for given, files, said in (
        ([], [tmp_path / "none"], "none: No such file"),
        ([], [tmp_path], "Is a directory"),
        ([], [empty], "got no key"),
        ([], [binary], "no text"),
        ([], [spaced], "without spaces"),
        ([""], [], "without spaces"),
        (["secrét"], [], "without spaces"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            keys(given, files)
        assert "secr" not in str(caught.value) and "words" not in str(caught.value)
