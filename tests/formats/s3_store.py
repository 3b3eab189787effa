"""An S3 server of our own on the loopback, and the environment that makes s3:// URLs lead to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import fsspec
import pytest

BUCKET = "bucket"


@contextmanager
def serving() -> Iterator[tuple[Any, Any]]:
    """A running server with one bucket, and a file system for it."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    here = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "the-key-id",
        "AWS_SECRET_ACCESS_KEY": "the-secret-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    kind = fsspec.get_filesystem_class("s3")
    with patch.dict(os.environ, kept | here, clear=True):
        kind.clear_instance_cache()
        files = kind(use_listings_cache=False)
        with suppress(FileExistsError):  # all servers of one process show the same data
            files.mkdir(BUCKET)
        try:
            yield server, files
        finally:
            server.stop()
            kind.clear_instance_cache()
