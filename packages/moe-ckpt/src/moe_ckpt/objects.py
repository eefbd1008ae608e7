"""Object stores: S3 and what speaks its protocol, Google Cloud Storage, memory.

An object is written whole or not at all, a listing may be long, and nothing can be renamed.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tensorstore as ts


class ObjectPath:
    """A place in an object store, with as much of ``pathlib.Path`` as this package uses.

    Args:
        store: Of tensorstore.
        key: Below it, without a slash at either end.
        url: Of the store, for people.
    """

    def __init__(self, store: Any, key: str, url: str):
        self.store, self.key, self.url = store, key, url

    @property
    def name(self) -> str:
        """Last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The place that this one is in."""
        return type(self)(self.store, self.key.rpartition("/")[0], self.url)

    def __truediv__(self, part: str) -> Self:
        return type(self)(self.store, f"{self.key}/{part}".strip("/"), self.url)

    def __str__(self) -> str:
        return f"{self.url}{self.key}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __lt__(self, other: "ObjectPath") -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def relative_to(self, other: "ObjectPath") -> str:
        """Return the key below ``other``."""
        return self.key.removeprefix(other.key).strip("/")

    def read_bytes(self) -> bytes:
        """Return the object.

        Raises:
            FileNotFoundError: If there is none.
        """
        return self.read_part(None)

    def read_part(self, part: slice | None) -> bytes:
        """Return a part of the object.

        Raises:
            FileNotFoundError: If there is none.
            EOFError: If it does not reach so far.
        """
        try:
            found = self.store.read(self.key, byte_range=part).result()
        except ValueError as error:
            if "OUT_OF_RANGE" not in str(error):
                raise
            raise EOFError(f"{self} does not reach so far") from error
        if found.state != "value":
            raise FileNotFoundError(f"{self} does not exist")
        return found.value

    def write_bytes(self, data: bytes) -> None:
        """Make or replace the object."""
        self.store.write(self.key, data).result()

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the object, if it is there."""
        self.store.write(self.key, None).result()

    def exists(self) -> bool:
        """Return whether there is an object here, or one below."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether there is an object here."""
        return bool(self.key) and self.store.read(self.key).result().state == "value"

    def is_dir(self) -> bool:
        """Return whether there is an object below."""
        return bool(self._below())

    def iterdir(self) -> Iterator[Self]:
        """Yield what is directly below, once each."""
        start = len(self.key) + 1 if self.key else 0
        for name in sorted({key[start:].partition("/")[0] for key in self._below()}):
            yield self / name

    def rglob(self, pattern: str) -> Iterator[Self]:
        """Yield every object below; ``pattern`` has to be ``"*"``."""
        if pattern != "*":
            raise NotImplementedError(pattern)
        for key in self._below():
            yield type(self)(self.store, key, self.url)

    def remove(self) -> None:
        """Delete every object below."""
        self.store.delete_range(self._range()).result()

    def nbytes(self) -> int:
        """Return the length of the object."""
        return len(self.read_bytes())

    def _below(self) -> list[str]:
        return [key.decode() for key in self.store.list(self._range()).result()]

    def _range(self) -> Any:
        if not self.key:
            return ts.KvStore.KeyRange()
        return ts.KvStore.KeyRange(f"{self.key}/", f"{self.key}0")  # "0" comes after "/"


Place = Path | ObjectPath


def as_place(root: "str | Path | ObjectPath | Mapping[str, Any]") -> Path | ObjectPath:
    """Return where something is: a path, or a place in an object store.

    Args:
        root: A path; a URL such as ``s3://BUCKET/RUN`` or ``gs://BUCKET/RUN``; or, for what a URL
            does not say, the JSON of a key-value store of tensorstore, as a mapping or as text.
            A store that speaks the protocol of S3: ``{"driver": "s3", "bucket": "BUCKET",
            "path": "RUN/", "endpoint": "https://HOST", "aws_region": "REGION"}``.

    Examples:
        >>> as_place("runs/one"), as_place("memory://one")
        (PosixPath('runs/one'), ObjectPath('memory://one/'))
    """
    if isinstance(root, Path | ObjectPath):
        return root
    if isinstance(root, str):
        if root.startswith("{"):
            root = json.loads(root)
        elif "://" in root and not root.startswith("file://"):
            root = ts.KvStore.Spec(root.rstrip("/") + "/").to_json()
        else:
            return Path(root.removeprefix("file://"))
    spec = {**root, "path": root.get("path", "").rstrip("/") + "/" if root.get("path") else ""}
    store = ts.KvStore.open(spec, context=_context()).result()
    return ObjectPath(store, "", _url(spec))


def _url(spec: Mapping[str, Any]) -> str:
    scheme = {"gcs": "gs"}.get(spec["driver"], spec["driver"])
    bucket = f"{spec['bucket']}/" if "bucket" in spec else ""
    return f"{scheme}://{bucket}{spec['path']}"


@functools.cache
def _context() -> Any:
    # One for the process: a memory store lives as long as its context.
    return ts.Context({})
