"""What answers of a server mean, and what is said of them."""

from __future__ import annotations

import httpx
import pytest

from ampwatch.answers import Answer, failed, is_loopback, read, why_not

SERVER = "https://ampwatch.example.org"
HTML = {"html": "<html><title>Sign in</title></html>"}


def answer(status, token="secret", **content):
    return read(httpx.Response(status, **content), SERVER, token)


def test_a_json_object_is_an_acknowledgement():
    assert answer(200, json={"stored": True, "next_batch_s": 7}) == Answer("stored", pause_s=7.0, status=200)
    assert (answer(200, json={"last_seq": 3}).last_seq, answer(200, json={"last_seq": "3"}).last_seq) == (
        3,
        None,
    )
    assert answer(200, json={"next_batch_s": "soon"}) == Answer("stored", status=200)
    assert answer(200, json={"next_batch_s": -1}).pause_s == 0.0
    assert answer(200, json={"next_batch_s": "NaN"}).pause_s is None


@pytest.mark.parametrize("status", [200, 204, 302, 400, 404, 405, 501])
def test_what_is_no_ampwatch_server_is_told_from_one(status):
    got = answer(status, headers={"Content-Type": "text/html"}, content=b"<html>")
    assert (got.outcome, got.about) == ("barred", "foreign")
    assert f"does not answer as an ampwatch server does ({status}, text/html)" in got.warning


def test_where_a_redirection_leads_is_told():
    got = answer(302, headers={"Location": "https://sso.example.org/login"})
    assert "(302, to https://sso.example.org/login)" in got.warning


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_trouble_may_pass(status):
    assert answer(status, **HTML).outcome == "later"
    assert answer(status, headers={"Retry-After": "3600"}).pause_s == 3600.0
    date = {"Retry-After": "Fri, 31 Dec 2027 23:59:59 GMT"}
    assert answer(status, headers=date | {"Date": "Fri, 31 Dec 2027 23:58:00 GMT"}).pause_s == 119.0
    assert answer(status, headers=date).pause_s is None


@pytest.mark.parametrize("status", [409, 413, 415, 422])
def test_a_refusal_gives_the_servers_reason(status):
    said = {"title": "Invalid batch", "detail": "columns.loss: got 3 rows"}
    assert answer(status, json=said).warning == f"{SERVER} refused records: {status} columns.loss: got 3 rows"
    assert answer(413, **HTML).warning == f"{SERVER} refused records: 413 Request Entity Too Large"


def test_what_may_be_mended_on_the_spot():
    outcomes = {status: answer(status, **HTML).outcome for status in (413, 415, 426)}
    assert outcomes == {413: "too large", 415: "unread", 426: "unread"}


def test_a_host_that_the_server_does_not_know_is_told_in_its_words():
    got = answer(
        421, json={"detail": "this server does not answer to the host 'a'; add it to its allowed hosts"}
    )
    assert (got.outcome, "add it to its allowed hosts" in got.warning) == ("barred", True)


def test_without_a_token_the_warning_says_where_to_get_one():
    wanted = "wants a token: set AMPWATCH_TOKEN to one that `ampwatch token create` made there"
    assert answer(401, token=None).warning == f"{SERVER} {wanted}"
    assert (
        "does not accept the token (403): set AMPWATCH_TOKEN to one with the scope write"
        in answer(403).warning
    )
    told = answer(403, json={"detail": "run r is not one of project 'p', which this token is for"}).warning
    assert "does not accept the token (403: run r is not one of project 'p'" in told


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("[Errno 111] Connection refused", "Connection refused. Does `ampwatch serve` run there?"),
        ("[Errno -2] Name or service not known", "Name or service not known. Is the name right?"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "It does not speak https; try http://"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", "SSL_CERT_FILE may name the file of the authority"),
        ("Server disconnected without sending a response.", "Does it want https://?"),
        ("", "ConnectError"),
    ],
)
def test_a_failed_connection_says_what_to_look_at(error, said):
    got = failed(httpx.ConnectError(error), SERVER)
    assert (got.outcome, got.about, said in got.warning) == ("later", "connection", True)
    assert got.warning.startswith(f"{SERVER} cannot be reached: ")


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("http://127.0.0.1:1", ""),
        ("http://[::1]:1", ""),
        ("http://localhost", ""),
        ("https://ampwatch.example.org/base", ""),
        ("http://ampwatch.example.org", "is another machine and not https"),
        ("http://10.0.0.1:8642", "a tunnel (ssh -L 8642:127.0.0.1:8642 10.0.0.1)"),
        ("ampwatch.example.org", "is not an address such as"),
        ("ampwatch.example.org:8642", "is not an address such as"),
        ("ftp://ampwatch.example.org", "is not an address such as"),
        ("http://127.0.0.1:99999", "is not an address such as"),
        ("http://a b", "is not an address such as"),
        ("http://[", "is not an address such as"),
    ],
)
def test_where_a_token_may_be_sent(server, reason):
    assert reason in why_not(server)
    assert bool(why_not(server)) == bool(reason)


def test_loopback():
    hosts = ("localhost", "127.8.8.8", "::1", "10.0.0.1", "a.example")
    assert [is_loopback(host) for host in hosts] == [True, True, True, False, False]
