"""Ports of this machine."""

import socket


def free_port() -> int:
    """Give a TCP port that no process listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
