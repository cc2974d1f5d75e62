"""chDB's folder: which one an address names, and whether another process owns it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pipeline.secret import without_password
from pipeline.store.errors import StoreError

EMBEDDED_SCHEME: Final = "chdb"
_open_folders: Counter[Path] = Counter()
_open_folders_lock: Final = threading.Lock()


def embedded_folder(dsn: str) -> Path | None:
    """The folder of a `chdb:///folder` address; None for a server's. Raises StoreError on a wrong address."""
    try:
        parts = urlsplit(dsn)
        _port = parts.port
    except ValueError:  # whose message may hold the password
        raise StoreError("clickhouse.dsn: host or port is none; expected http://host:8123") from None
    if parts.scheme in ("http", "https") and parts.hostname:
        return None
    if parts.scheme == EMBEDDED_SCHEME and not parts.netloc and len(parts.path.strip("/")) > 0:
        return Path("/" + parts.path.lstrip("/"))
    raise StoreError(
        f"clickhouse.dsn {without_password(dsn)!r}: expected http://host:8123, https://host:8443 "
        "or chdb:///absolute/folder"
    )


def owned_by_another(folder: Path) -> bool:
    """Whether another process holds chDB's lock on the folder."""
    with _open_folders_lock:
        if _open_folders[folder] > 0:
            return False
    try:
        descriptor = os.open(folder / "status", os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"chDB folder {folder}: {error.strerror}; use a folder you may write") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def opened(folder: Path) -> None:
    """This process has one more connection to it."""
    with _open_folders_lock:
        _open_folders[folder] += 1


def closed(folder: Path) -> None:
    """And one less; after the last the folder is free again."""
    with _open_folders_lock:
        _open_folders[folder] -= 1
