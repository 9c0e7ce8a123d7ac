"""URLs: what is understood, what is refused, and that no password is ever shown."""

import pytest
import redis
from embedq_broker.connect import broker_errors, connect, mask_url, translate
from embedq_schemas.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    UsageError,
)
from hypothesis import given
from hypothesis import strategies as st
from redis.sentinel import SentinelConnectionPool


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:secret@host/1?ssl_password=key", "rediss://user:***@host/1?ssl_password=***"),
        ("redis://user:se/cr?e@t@host", "redis://user:***@host"),
        ("unix:///tmp/a@b.sock?db=1&password=x", "unix:///tmp/a@b.sock?db=1&password=***"),
        ("unix://user:secret@/tmp/a.sock", "unix://user:***@/tmp/a.sock"),
        (
            "redis+sentinel://u:secret@a:1,b:2/main/0?sentinel_password=x&db=1",
            "redis+sentinel://u:***@a:1,b:2/main/0?sentinel_password=***&db=1",
        ),
        ("user:secret@host", "***@host"),
    ],
)
def test_mask_url_hides_every_password_and_nothing_else(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@given(password=st.text(min_size=1).map(lambda text: f"pw{text}word"), scheme=st.sampled_from(["redis", "rediss"]))
def test_mask_url_hides_a_password_of_any_characters(password: str, scheme: str) -> None:
    assert password not in mask_url(f"{scheme}://user:{password}@host:6379/0")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://:secret@host",
        "redis://",
        "redis://:secret@/0",
        "redis://:secret@host:port",
        "redis://:se/secret@host:6379",
        "redis://:secret@host/none",
        "redis://:secret@host?no_such_option=1",
        "unix://",
        "redis+sentinel://:secret@host:1",
        "redis+sentinel://:secret@host:port/main",
        "redis+sentinel://:secret@host:1/main/db",
        "redis+sentinel:///main",
    ],
)
def test_a_url_that_cannot_be_understood_is_a_usage_error_without_the_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        connect(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None, "the cause quotes pieces of the URL"


def test_a_percent_encoded_password_and_database_reach_the_connection() -> None:
    arguments = connect("redis://us%40er:p%2Fw@host:1/3").connection_pool.connection_kwargs
    assert (arguments["username"], arguments["password"], arguments["db"]) == ("us@er", "p/w", 3)


def test_a_url_cannot_change_how_replies_are_read() -> None:
    pool = connect("redis://host?decode_responses=1&protocol=3&socket_timeout=0.1").connection_pool
    assert pool.connection_kwargs["decode_responses"] is False
    assert pool.connection_kwargs["protocol"] == 2
    assert pool.connection_kwargs["socket_timeout"] == 30.0


def test_a_blocking_connection_never_retries() -> None:
    assert connect("redis://host", blocking=True).connection_pool.connection_kwargs["retry"].get_retries() == 0
    assert connect("redis://host").connection_pool.connection_kwargs["retry"].get_retries() > 0


def test_a_sentinel_url_names_service_sentinels_and_both_users() -> None:
    url = "rediss+sentinel://user:pw@a:1,[::1]:2,b/main/4?sentinel_password=spw&ssl_cert_reqs=none"
    pool = connect(url).connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "main"
    sentinels = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in sentinels] == [("a", 1), ("::1", 2), ("b", 26379)]
    assert {each["password"] for each in sentinels} == {"spw"}
    arguments = pool.connection_kwargs
    assert (arguments["username"], arguments["password"], arguments["db"]) == ("user", "pw", 4)
    assert arguments["ssl_cert_reqs"] == "none"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (redis.exceptions.OutOfMemoryError("command not allowed"), BrokerOutOfMemoryError, "out of memory"),
        (redis.ResponseError("OOM command not allowed when used memory"), BrokerOutOfMemoryError, "out of memory"),
        (redis.AuthenticationError("invalid username-password pair"), BrokerAuthError, "refused access"),
        (redis.exceptions.NoPermissionError("no permissions to run 'xadd'"), BrokerAuthError, "'xadd'"),
        (redis.ResponseError("ACL failure in script: no permissions"), BrokerAuthError, "ACL failure"),
        (redis.BusyLoadingError("loading"), BrokerUnavailableError, "still loading"),
        (redis.exceptions.ReadOnlyError("replica"), BrokerUnavailableError, "read-only replica"),
        (redis.ResponseError("MISCONF Errors writing to the AOF file"), BrokerUnavailableError, "disk full"),
        (redis.exceptions.MovedError("1234 node:7001"), BrokerError, "node:7001"),
        (redis.TimeoutError("Timeout reading from socket"), BrokerUnavailableError, "in time"),
        (redis.ResponseError("WRONGTYPE Operation"), BrokerError, "WRONGTYPE"),
        (redis.DataError("Invalid input"), BrokerError, "Invalid input"),
    ],
)
def test_each_failure_becomes_one_sentence_that_names_the_server(
    error: redis.RedisError, kind: type[BrokerError], words: str
) -> None:
    translated = translate(error, "redis://:secret@host:1/0")
    assert type(translated) is kind
    message = str(translated)
    assert words in message
    assert message.startswith("Redis at redis://:***@host:1/0") or isinstance(error, redis.DataError)
    assert message.endswith(".")
    assert "\n" not in message


def test_broker_errors_lets_other_errors_pass() -> None:
    with pytest.raises(KeyError), broker_errors("redis://host"):
        raise KeyError("mine")


def test_a_missing_sentinel_shows_neither_credentials_nor_internals() -> None:
    url = "redis+sentinel://user:secret@127.0.0.1:1/main?sentinel_password=other"
    with pytest.raises(BrokerUnavailableError) as caught, broker_errors(url):
        connect(url, blocking=True).ping()
    assert str(caught.value).endswith("cannot be reached: No master found for 'main'.")
