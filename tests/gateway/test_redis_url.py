from __future__ import annotations

import pytest

from gateway.redis_url import Address, ClusterAddress, parse_redis_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost", Address("localhost", 6379)),
        ("redis://:p%40ss@db.example:6380/3", Address("db.example", 6380, password="p@ss", database=3)),
        ("rediss://me:secret@[::1]:1/0", Address("::1", 1, tls=True, username="me", password="secret")),
        ("redis://h?db=2", Address("h", database=2)),
        ("unix:///run/redis.sock?db=1", Address(path="/run/redis.sock", database=1)),
        ("unix://:pw@/run/redis.sock", Address(path="/run/redis.sock", password="pw")),
        ("redis+cluster://a", ClusterAddress((Address("a"),))),
        (
            "redis+cluster://:p%2Cw@a:1,b.example:2/0",
            ClusterAddress((Address("a", 1, password="p,w"), Address("b.example", 2, password="p,w"))),
        ),
        (
            "rediss+cluster://me:pw@[::1]:1,[::2]",
            ClusterAddress(
                (
                    Address("::1", 1, tls=True, username="me", password="pw"),
                    Address("::2", tls=True, username="me", password="pw"),
                )
            ),
        ),
    ],
)
def test_urls(url: str, address: Address | ClusterAddress) -> None:
    assert parse_redis_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "http://:hunter2@h",
        "redis://:hunter2@h/one",
        "redis://:hunter2/x@h:1/0",
        "redis://:hunter2#x@h",
        "redis://:1#hunter2@h",
        "redis://:1?hunter2@h",
        "redis://:hunter2[@h",
        "redis://:p@h:hunter2/0",
        "unix+cluster://:hunter2@/run/redis.sock",
        "redis+cluster://:hunter2@a:1,,b:2",
        "redis+cluster://:hunter2@",
        "redis+cluster://:hunter2@a:1,b:2/3",
        "redis+cluster://:hunter2/x@a:1,b:2",
        "redis+cluster://:hunter2?x@a:1,b:2",
        "redis+cluster://:p@a:hunter2,b",
    ],
)
def test_a_wrong_url_does_not_tell_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="Redis URL") as caught:
        parse_redis_url(url)
    assert "hunter2" not in str(caught.value)


def test_a_cluster_is_not_taken_for_one_server() -> None:
    with pytest.raises(ValueError, match="cluster"):
        Address.parse("redis+cluster://:hunter2@a:1")
