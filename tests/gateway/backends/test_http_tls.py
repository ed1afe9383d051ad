"""TLS to backends: whom to believe, and when an answer is whole."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.backends.faults import BackendFault
from gateway.backends.transport import Transport
from tests.gateway.backends.http_support import WHOLE, RawServer, Script, answers, asked, gone, request, whole
from tests.gateway.backends.relay_support import eventually

MakeServer = Callable[..., RawServer]
MakeContext = Callable[..., ssl.SSLContext]


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName], by: ec.EllipticCurvePrivateKey
) -> bytes:
    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named("authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=key is by, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def server_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeContext:
    """Contexts of servers whose certificates an authority issued that is believed, as the environment says."""
    authority = ec.generate_private_key(ec.SECP256R1())
    trusted = tmp_path / "authority.pem"
    trusted.write_bytes(_certificate("authority", authority, [], authority))
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))

    def make(*names: str, believed: bool = True) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.IPAddress(ip_address(n)) if n[0].isdigit() else x509.DNSName(n) for n in names]
        issuer = authority if believed else ec.generate_private_key(ec.SECP256R1())
        file = tmp_path / "server.pem"
        file.write_bytes(
            _certificate("server", key, list(subject), issuer)
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context

    return make


async def test_names_and_addresses(raw_server: MakeServer, server_context: MakeContext) -> None:
    context = server_context("localhost", "127.0.0.1")
    asked_for: list[str | None] = []
    context.sni_callback = lambda _, name, __: asked_for.append(name)
    server = await raw_server(answers(WHOLE), tls=context).start()
    async with Transport() as transport:
        for host in ("localhost", "localhost", "127.0.0.1", "127.0.0.1"):
            assert await whole(await asked(transport, f"https://{host}:{server.port}/v1")) == b"ok"
    assert asked_for == ["localhost", None]  # an address is no name (RFC 6066)
    await eventually(lambda: server.ended == 2)


@pytest.mark.parametrize(("names", "believed"), [(["elsewhere.example"], True), ([], True), (["localhost"], False)])
async def test_whom_not_to_believe(
    raw_server: MakeServer, server_context: MakeContext, names: list[str], believed: bool
) -> None:
    reached: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.read(1))

    server = await raw_server(script, tls=server_context(*names, believed=believed)).start()
    async with Transport() as transport:
        with pytest.raises(BackendFault) as caught:
            await asked(transport, f"https://localhost:{server.port}")
        assert transport._pool is not None
        assert not transport._pool._open
    assert caught.value.unreachable
    assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
    assert reached in ([], [b""])


async def test_a_server_that_speaks_no_tls(raw_server: MakeServer, server_context: MakeContext) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    server = await raw_server(script).start()
    async with Transport() as transport:
        with pytest.raises(BackendFault) as caught:
            await asked(transport, server.url.replace("http:", "https:"))
    assert caught.value.unreachable


@pytest.mark.parametrize("ending", ["limit", "cancelled"])
async def test_a_handshake_that_does_not_come_about(
    raw_server: MakeServer, server_context: MakeContext, ending: str
) -> None:
    began = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        began.set()
        await gone(reader)

    server = await raw_server(script).start()
    async with Transport() as transport:
        within_s = 0.3 if ending == "limit" else 10.0
        asking = asyncio.ensure_future(asked(transport, server.url.replace("http:", "https:"), connect_s=within_s))
        await began.wait()
        if ending == "cancelled":
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            with pytest.raises(BackendFault) as caught:
                await asking
            assert caught.value.unreachable
        await eventually(lambda: server.ended == 1)


def until_closed(*, said_so: bool) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nok")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close() if said_so else writer.transport.abort()

    return script


async def test_an_answer_until_the_connection_closes_is_whole_when_the_peer_says_so(
    raw_server: MakeServer, server_context: MakeContext
) -> None:
    server = await raw_server(until_closed(said_so=True), tls=server_context("127.0.0.1")).start()
    async with Transport() as transport:
        assert await whole(await asked(transport, server.url)) == b"ok"


@pytest.mark.asyncio(loop_factories=["uvloop"])  # asyncio does not tell how a connection ended
async def test_an_answer_that_is_cut_within_tls_is_not_whole(
    raw_server: MakeServer, server_context: MakeContext
) -> None:
    server = await raw_server(until_closed(said_so=False), tls=server_context("127.0.0.1")).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        assert await reply.read_some() == b"ok"
        with pytest.raises(BackendFault) as caught:
            await reply.read_some()
    assert caught.value.code == "backend_disconnected"


async def test_large_bodies_both_ways(raw_server: MakeServer, server_context: MakeContext) -> None:
    size = 5 * 1024 * 1024

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            _, body = await request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()

    server = await raw_server(script, tls=server_context("127.0.0.1")).start()
    async with Transport() as transport:
        for byte in (b"a", b"b"):
            reply = await asked(transport, server.url, byte * size)
            await asyncio.sleep(0.05)
            assert len(reply._answer.body) < size / 2
            assert await whole(reply) == byte * size
    assert server.connections == 1


async def test_a_hang_up_is_seen(raw_server: MakeServer, server_context: MakeContext) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await gone(reader)

    server = await raw_server(script, tls=server_context("127.0.0.1")).start()
    async with Transport() as transport:
        reply = await asked(transport, server.url)
        assert await reply.read_some() == b"ok"
        reply.close()
        await eventually(lambda: server.ended == 1)
