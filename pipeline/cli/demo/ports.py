"""Ports for what the demo starts."""

from __future__ import annotations

import errno
import secrets
import socket
from typing import Final

FIRST: Final = 12_000
LAST: Final = 31_999
"""Below the ports that systems give to outgoing connections: none takes one before who is to listen does."""


def free_port() -> int:
    """A port of loopback that nobody listens on now. Raises OSError where nobody may listen at all."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST + 1)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
