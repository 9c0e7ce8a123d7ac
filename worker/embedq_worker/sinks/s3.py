"""A dataset below a prefix of an S3 bucket, or of anything that speaks S3.

Credentials, region and endpoint are found the way every AWS tool finds them: environment, profile, instance role,
`AWS_ENDPOINT_URL`. boto3 is imported when the first such dataset is used.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import tempfile
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from embedq_broker.faults import fault_point
from embedq_schemas.errors import EmbedqError, OutputError, StorageError, UsageError
from embedq_schemas.manifest import PublishedFile, Upload
from embedq_schemas.names import S3_PATTERN
from msgspec import UNSET

from embedq_worker.sinks.files import storage_errors
from embedq_worker.sinks.store import SUCCESS_NAME, CommittedFileError, Staged

log = logging.getLogger(__name__)

LINES_NAME = "_manifest"
"""Folder of the manifest's lines: `<token>.json` for each published file."""
PART_BYTES = 16 << 20
"""Of an upload's parts, but the last; S3 takes 5 MiB or more, and 10,000 parts."""
_PARALLEL = 4
_PARALLEL_READS = 16
_CONFLICTS = 5
_REFUSALS = {
    "NoSuchBucket": "there is no such bucket",
    "InvalidBucketName": "there is no such bucket",
    "AccessDenied": "access is denied to these credentials",
    "AllAccessDisabled": "access is denied to these credentials",
    "403": "access is denied to these credentials",
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret access key is wrong",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "301": "the bucket is in another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION",
    "NotImplemented": "the endpoint does not do what is needed",
    "501": "the endpoint does not do what is needed",
}
"""What no waiting changes, by error code; HEAD requests are answered with the status alone."""
_PASSING = frozenset({"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "OperationAborted", "BadDigest"})
_MISSING = frozenset({"NoSuchKey", "404", "NoSuchUpload"})


def store_at(location: str) -> S3Store:
    """The store at `s3://bucket/prefix`, one for each place in this process.

    Raises:
        UsageError: it is not of this form, or boto3 is not installed.
        OutputError: the AWS configuration cannot be used.
    """
    found = re.match(S3_PATTERN, location.rstrip("/"))
    if found is None:
        # It may hold a password, so it is not repeated.
        raise UsageError("a dataset on an object store is named s3://bucket/prefix, without '..', '//' or a query")
    return _store(found[0], found[1], found[2].removeprefix("/"))


@lru_cache(maxsize=256)
def _store(location: str, bucket: str, prefix: str) -> S3Store:
    return S3Store(location, bucket, prefix)


@lru_cache(maxsize=1)
def _client() -> Any:
    try:
        import boto3
        import botocore.exceptions
        from botocore.config import Config
    except ImportError:
        raise UsageError("s3:// needs boto3: pip install 'embedq[s3]'") from None
    for name in ("boto3", "botocore", "urllib3"):
        # Below it they log headers, and with them session tokens and signatures.
        logging.getLogger(name).setLevel(logging.WARNING)
    config = Config(
        # Well below the time after which a process in which nothing moves is ended.
        connect_timeout=10,
        read_timeout=20,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=2 * _PARALLEL_READS,
        # Parts carry MD5 sums, which every endpoint knows; newer checksums are refused by many.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise OutputError(f"the AWS configuration cannot be used: {type(error).__name__}") from None


class S3Store:
    """`Store` of one prefix. Safe for threads.

    An error says what was refused and never repeats what the endpoint said: that may quote credentials.
    """

    def __init__(self, location: str, bucket: str, prefix: str) -> None:
        self._location, self._bucket, self._prefix = location, bucket, prefix
        self._client = _client()
        #: The manifest as far as it was read; a line never changes.
        self._lines: dict[str, PublishedFile] = {}
        self._tried = False

    @property
    def location(self) -> str:
        return self._location

    @property
    def endpoint(self) -> str:
        """URL of the server; empty for AWS itself, where a bucket's name is the only one of its kind."""
        url = str(self._client.meta.endpoint_url)
        return "" if re.search(r"\.amazonaws\.com(\.cn)?$", url) else url

    def prepare(self) -> None:
        """Try out, once in a process, what the endpoint can do; an object store has no folders to make."""
        if not self._tried:
            self.probe()

    def is_empty(self) -> bool:
        prefix = self._key("")
        with self._asking("read"):
            found = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=2)
        # Consoles make empty objects for what they show as folders.
        return all(entry["Key"] == prefix for entry in found.get("Contents", ()))

    def probe(self) -> None:
        name = f".probe-{uuid.uuid4().hex}"
        with self._asking("write into"):
            upload = self._client.create_multipart_upload(Bucket=self._bucket, Key=self._key(name))["UploadId"]
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._key(name), UploadId=upload)
        twice = 0
        for _ in range(2):
            with suppress(FileExistsError):
                self.create(name, b"embedq")
                twice += 1
        self.delete([name])
        if twice > 1:
            raise OutputError(
                f"{self._location}: the endpoint does not honour If-None-Match, so that two runs could write over each "
                "other; give a directory, or another store"
            )
        self._tried = True

    def read(self, name: str) -> bytes:
        with self._asking("read", name):
            return bytes(self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read())

    def lines(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def source(self, name: str) -> BinaryIO:
        with self._asking("read", name):
            size = self._client.head_object(Bucket=self._bucket, Key=self._key(name))["ContentLength"]
        return cast(BinaryIO, _Reader(self, name, size))

    def read_range(self, name: str, first: int, end: int) -> bytes:
        """Bytes `first` to `end`, exclusively; at least one."""
        with self._asking("read", name):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name), Range=f"bytes={first}-{end - 1}")
            return bytes(answer["Body"].read())

    def exists(self, name: str) -> bool:
        return self._head(name) is not None

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {name: entry["Size"] for name, entry in self._list(folder)}

    def modified(self, name: str) -> float:
        with self._asking("read", name):
            answer = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        return float(answer["LastModified"].timestamp())

    def age(self, name: str) -> float:
        """Seconds since the object was written, by the server's clock."""
        with self._asking("read", name):
            answer = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return float((now - answer["LastModified"]).total_seconds())

    def create(self, name: str, data: bytes) -> None:
        for attempt in range(_CONFLICTS):
            try:
                with self._asking("write", name):
                    self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=data, IfNoneMatch="*")
                return
            except _ConflictError:
                # S3's word for: two at once, ask again.
                if attempt == _CONFLICTS - 1:
                    raise
                time.sleep(0.1 * (attempt + 1))

    def replace(self, name: str, data: bytes) -> None:
        with self._asking("write", name):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=data)

    def delete(self, names: Iterable[str]) -> None:
        # One by one: there are few, and endpoints disagree about the checksum of a request for many.
        for name in names:
            with self._asking("remove", name):
                self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def stage(
        self, token: str, write: Callable[[Path], None], check: Callable[[Path], None], moved: Callable[[], None]
    ) -> Staged:
        with storage_errors("write a temporary file"), tempfile.TemporaryDirectory(prefix="embedq-") as folder:
            path = Path(folder) / "part.parquet"
            write(path)
            fault_point("stage.written")
            check(path)
            upload = self._upload(f"part-{token}.parquet", path, moved)
            fault_point("stage.fsynced")
            size = path.stat().st_size
        fault_point("stage.verified")
        return Staged(size, upload)

    def _upload(self, name: str, path: Path, moved: Callable[[], None]) -> Upload:
        """All parts of a multipart upload, which is left incomplete."""
        with self._asking("write", name):
            upload = str(self._client.create_multipart_upload(Bucket=self._bucket, Key=self._key(name))["UploadId"])

        def send(number: int) -> tuple[str, bytes]:
            with path.open("rb") as file:
                file.seek((number - 1) * PART_BYTES)
                data = file.read(PART_BYTES)
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            with self._asking("write", name):
                answer = self._client.upload_part(
                    Bucket=self._bucket,
                    Key=self._key(name),
                    UploadId=upload,
                    PartNumber=number,
                    Body=_Watched(data, moved),
                    ContentMD5=b64encode(digest).decode(),
                )
            return str(answer["ETag"]), digest

        count = -(-path.stat().st_size // PART_BYTES)
        try:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                sent = list(pool.map(send, range(1, count + 1)))
        except FileNotFoundError:
            raise StorageError(f"cannot write {self._location}/{name}: its upload was aborted meanwhile") from None
        except BaseException:
            self._abort(name, upload)
            raise
        etags = tuple(etag for etag, _ in sent)
        # Where parts are encrypted on the other side, ETags are something else.
        foreseen = all(etag.strip('"') == digest.hex() for etag, digest in sent)
        whole = hashlib.md5(b"".join(digest for _, digest in sent), usedforsecurity=False).hexdigest()
        return Upload(id=upload, parts=etags, etag=f'"{whole}-{count}"' if foreseen else UNSET)

    def is_staged(self, file: PublishedFile) -> bool:
        if not isinstance(file.upload, Upload):
            return False
        try:
            with self._asking("read", file.name):
                pages = self._client.get_paginator("list_parts").paginate(
                    Bucket=self._bucket, Key=self._key(file.name), UploadId=file.upload.id
                )
                parts = [part for page in pages for part in page.get("Parts", ())]
        except FileNotFoundError:
            return False
        return bool(sum(part["Size"] for part in parts) == file.size_bytes)

    def discard(self, file: PublishedFile) -> None:
        if isinstance(file.upload, Upload):
            self._abort(file.name, file.upload.id)

    def _abort(self, name: str, upload: str) -> None:
        """As well as it goes: the end of the run does it again."""
        try:
            with self._asking("write", name):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._key(name), UploadId=upload)
        except FileNotFoundError:
            pass
        except EmbedqError as error:
            log.warning("an upload is left to the end of its run: %s", error)

    def discard_staged(self) -> None:
        with self._asking("write into"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._key("part-")
            )
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            with suppress(FileNotFoundError), self._asking("write into"):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def publish(self, file: PublishedFile, *, thoroughly: bool) -> None:
        # The store has compared every part with its MD5 sum, so there is nothing to look at thoroughly.
        upload = file.upload
        if not isinstance(upload, Upload):
            raise CommittedFileError(f"{self._location}/{file.name} was committed without its upload")
        if self.exists(SUCCESS_NAME) and not self.exists(file.name):
            # This process slept while another machine took the run over, and ended it.
            self.discard(file)
            raise OutputError(f"{self._location} is complete, and takes no other file")
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(upload.parts, 1)]
        try:
            with self._asking("publish", file.name):
                self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._key(file.name),
                    UploadId=upload.id,
                    MultipartUpload={"Parts": parts},
                )
        except FileNotFoundError:
            # Completed before, by us whose reply was lost, or by another process; or aborted.
            self._require_published(file, upload)
        fault_point("publish.renamed")
        fault_point("publish.synced")

    def _require_published(self, file: PublishedFile, upload: Upload) -> None:
        found = self._head(file.name)
        where = f"{self._location}/{file.name}"
        if found is None:
            raise CommittedFileError(f"{where} was committed, but neither it nor its upload exists: it was aborted")
        if found["ContentLength"] != file.size_bytes:
            raise CommittedFileError(f"{where} holds {found['ContentLength']} bytes, {file.size_bytes} were committed")
        if upload.etag is not UNSET and found["ETag"] != upload.etag:
            raise CommittedFileError(f"{where} has the ETag {found['ETag']}, {upload.etag} was committed")

    def files(self) -> dict[str, PublishedFile]:
        listed = sorted((entry["LastModified"], name) for name, entry in self._list(LINES_NAME))
        tokens = [name.removesuffix(".json") for _, name in listed if name.endswith(".json")]
        unknown = [token for token in tokens if token not in self._lines]
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            self._lines.update((line.token, line) for line in pool.map(self._line, unknown) if line is not None)
        return {token: self._lines[token] for token in tokens if token in self._lines}

    def _line(self, token: str) -> PublishedFile | None:
        try:
            return PublishedFile.decode(self.read(f"{LINES_NAME}/{token}.json").rstrip())
        except FileNotFoundError:
            # Withdrawn since we looked.
            return None

    def enlist(self, file: PublishedFile, *, replay: bool) -> None:
        line = msgspec.structs.replace(file, upload=UNSET).encode() + b"\n"
        self.replace(f"{LINES_NAME}/{file.token}.json", line)

    def withdraw(self, tokens: Collection[str]) -> None:
        self.delete(f"{LINES_NAME}/{token}.json" for token in tokens)
        self.delete(f"part-{token}.parquet" for token in tokens)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _list(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Objects directly in `folder`, by their names in it."""
        prefix = self._key(f"{folder}/" if folder else "")
        with self._asking("read"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, Delimiter="/"
            )
            for page in pages:
                named = ((entry["Key"].removeprefix(prefix), entry) for entry in page.get("Contents", ()))
                yield from ((name, entry) for name, entry in named if name)

    def _head(self, name: str) -> dict[str, Any] | None:
        try:
            with self._asking("read", name):
                return cast(dict[str, Any], self._client.head_object(Bucket=self._bucket, Key=self._key(name)))
        except FileNotFoundError:
            return None

    @contextmanager
    def _asking(self, what: str, name: str = "") -> Iterator[None]:
        """Raise what boto3 raises as an error of ours, FileNotFoundError or FileExistsError."""
        import botocore.exceptions as boto

        where = f"cannot {what} {self._location}{f'/{name}' if name else ''}"
        try:
            yield
        except boto.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            raise _refused(code, status, where) from None
        except (boto.NoCredentialsError, boto.PartialCredentialsError):
            raise OutputError(f"{where}: no AWS credentials are found; set AWS_PROFILE, or the two keys") from None
        except boto.CredentialRetrievalError:
            raise StorageError(f"{where}: the AWS credentials cannot be had at the moment") from None
        except (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError) as error:
            raise StorageError(f"{where}: no answer of the object store ({type(error).__name__})") from None
        except boto.BotoCoreError as error:
            raise OutputError(f"{where}: {type(error).__name__}") from None


class _ConflictError(StorageError):
    """A conditional write met another one."""


def _refused(code: str, status: int, where: str) -> Exception:
    """What an error's code and HTTP status mean."""
    if code in _MISSING:
        return FileNotFoundError(2, "there is no such object or upload", where)
    if code in ("PreconditionFailed", "412"):
        return FileExistsError(17, "it exists", where)
    if code in ("ConditionalRequestConflict", "409"):
        return _ConflictError(f"{where}: another writes it at this moment")
    passing = (status >= 500 and status != 501) or status == 429
    if passing or code in _PASSING or code.startswith(("Throttl", "Internal", "ServiceUn")):
        return StorageError(f"{where}: the object store answers {code or status}")
    if code in ("InvalidPart", "InvalidPartOrder", "EntityTooSmall"):
        return CommittedFileError(f"{where}: the upload has not the parts that were committed ({code})")
    return OutputError(f"{where}: {_REFUSALS.get(code, f'the object store answers {code or status}')}")


class _Watched(io.BytesIO):
    """Bytes that say that they are being sent: over a slow line a file takes longer than a lease."""

    def __init__(self, data: bytes, moved: Callable[[], None]) -> None:
        super().__init__(data)
        self._moved = moved

    def read(self, size: int | None = -1) -> bytes:
        self._moved()
        return super().read(size)


class _Reader(io.RawIOBase):
    """An object that Arrow reads parts of."""

    def __init__(self, store: S3Store, name: str, size: int) -> None:
        self._store, self._name, self._size, self._at = store, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._at + size)
        if end <= self._at:
            return b""
        data = self._store.read_range(self._name, self._at, end)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
