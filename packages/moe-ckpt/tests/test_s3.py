"""The same over the protocol of S3, spoken to a server: every prefix of the requests is sound."""

import io
import logging
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from moe_ckpt import RootLockedError, as_place, lease, load, problems, save, scan, verify
from moe_ckpt.__main__ import main
from moe_ckpt.testing import blank, cut, run_ranks
from moe_ckpt.testing.stores import FaultyStore

moto_server = pytest.importorskip("moto.server", reason="moto is not installed")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
serving = pytest.importorskip("werkzeug.serving", reason="werkzeug is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = {
    ("layers.0.w", "master"): (4, 3),
    ("layers.0.w", "exp_avg"): (4, 3),
    ("b", "master"): (5,),
}


class Request(NamedTuple):
    """A request that changed something: a key and what it became, or None if it was deleted."""

    key: str
    body: bytes | None


class Server:
    """A server that speaks the protocol of S3 and remembers what changed, in order."""

    def __init__(self) -> None:
        self.app = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self.requests: list[Request] = []
        self.http = serving.make_server("127.0.0.1", 0, self.answer, threaded=True)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def answer(self, environ, start) -> Iterator[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        environ["wsgi.input"] = io.BytesIO(body)
        method, status = environ["REQUEST_METHOD"], []

        def note(code, headers, *rest):
            status.append(code)
            return start(code, headers, *rest)

        answer = list(self.app(environ, note))
        _, bucket, key = [*environ["PATH_INFO"].split("/", 2), ""][:3]
        if method in ("PUT", "DELETE") and bucket and key and status[0].startswith("2"):
            self.requests.append(Request(key, body if method == "PUT" else None))
        if method == "POST" and "delete" in environ["QUERY_STRING"]:
            raise NotImplementedError("deletion of several keys at once is not recorded")
        return iter(answer)

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        server = Server()
        client = boto3.client("s3", endpoint_url=server.url, region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield server
        server.close()


@pytest.fixture
def root(server, request, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 4.0)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    server.requests.clear()
    spec = {"driver": "s3", "bucket": "bucket", "endpoint": server.url, "aws_region": "us-east-1"}
    return as_place({**spec, "path": f"runs/{abs(hash(request.node.name))}/"})


def arrays_of(value: float):
    return {key: np.full(shape, value, np.float32) for key, shape in SHAPES.items()}


def put(root, step, value, size=1, keep=None):
    def program(comm):
        shards = cut(arrays_of(value), comm.rank, comm.size)
        state = {"v": value}
        return save(root, shards, step=step, state=state, comm=comm, keep=keep, overwrite=True)

    return run_ranks(size, program)[0]


def seen(root) -> dict[int, float]:
    values = {}
    for checkpoint in scan(root).valid:
        verify(checkpoint.path)
        shards = blank(cut(arrays_of(0), 0, 1))
        loaded = load(root, shards, step=checkpoint.step)
        [value] = {float(x) for shard in shards for x in shard.data}
        assert loaded.state == {"v": value}
        values[checkpoint.step] = value
    assert not [item for item in scan(root).skipped if item.path.name != "LATEST"]
    return values


def test_a_checkpoint_goes_to_a_server_and_comes_back(root, capsys) -> None:
    rng = np.random.default_rng(0)
    arrays = {key: rng.random(shape, np.float32) for key, shape in SHAPES.items()}
    arrays["large", "master"] = rng.random((3, 1, 1 << 20), np.float32)  # three chunks of 4 MiB

    def write(comm):
        return save(root, cut(arrays, comm.rank, comm.size), step=1, state={"a": 1}, comm=comm)

    def read(comm):
        shards = cut(arrays, comm.rank, comm.size)
        into = blank(shards)
        assert load(root, into, comm=comm).state == {"a": 1}
        return all(a.data.tobytes() == b.data.tobytes() for a, b in zip(into, shards, strict=True))

    path = run_ranks(2, write)[0]
    assert all(run_ranks(3, read))
    assert verify(path).chunks == 3 + 1
    assert not list(problems(path, fast=True))
    chunk = path / "arrays/large/master/c.1.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    [problem] = problems(path, fast=True)
    assert type(problem).__name__ == "TruncatedChunkError"
    assert problem.details["chunk"] == [1, 0, 0]


@pytest.mark.parametrize("size", [1, 4])
def test_every_prefix_of_the_requests_holds_the_old_or_the_new(server, root, size) -> None:
    put(root, 1, 1.0)
    put(root, 2, 2.0)
    begin = len(server.requests)
    put(root, 3, 3.0, size, keep=2)  # a new one, and 1 goes
    put(root, 2, 20.0, size)  # 2 is replaced
    final = {3: 3.0, 2: 20.0}
    assert seen(root) == final
    allowed = [{1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0, 3: 3.0}, {2: 2.0, 3: 3.0}, final]
    store, prefix, reached = FaultyStore(), root.url.removeprefix("s3://bucket/"), 0
    for at, (key, body) in enumerate(server.requests):
        assert key.startswith(prefix)
        store.store.write(key.removeprefix(prefix), body).result()
        if at + 1 < begin:
            continue
        got = seen(store.path())
        now = allowed.index(got)  # one of them, and never an earlier one again
        assert now >= reached, at
        reached = now
    assert reached == len(allowed) - 1
    assert len(server.requests) - begin > 40


def test_a_lease_is_decided_by_the_server(root) -> None:
    with lease.Lease(root, 41, "aa"), pytest.raises(RootLockedError, match='"step": 41'):
        put(root, 1, 1.0)
    put(root, 1, 1.0)
    first, second = (lease.Lease(root, 1, nonce) for nonce in ("aa", "bb"))
    missing = first.place.store.read(first.place.key).result().stamp.generation
    first._seen = second._seen = missing
    assert first._write()
    assert not second._write()  # both saw none; the server takes one
    assert first._write()
    second._seen = first._seen
    assert second._write()
    assert not first._write()
    first.place.unlink()


def test_the_command_line_takes_the_spec_of_a_store(server, root, capsys) -> None:
    put(root, 1, 1.0)
    path = root.url.removeprefix("s3://bucket/")
    spec = (
        f'{{"driver": "s3", "bucket": "bucket", "endpoint": "{server.url}", '
        f'"aws_region": "us-east-1", "path": "{path}"}}'
    )
    assert main(["verify", spec]) == 0
    assert "3 arrays" in capsys.readouterr().out
    assert main(["ls", spec]) == 0
