"""How a trainer and its scoring workers talk: one TCP connection each, and messages of two frames.

Not a process group: a rank that dies inside a group leaves the others waiting or aborts them, and a
group cannot lose or gain members. A separate connection shows at once that its other end is gone, and
affects nobody else. The address at which a trainer listens, and the key that a worker must know, are in the
store that torchrun runs anyway. Nothing that is received can run code when it is read.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
import torch.distributed as dist

from rholoss.errors import RholossError

GREETING_SECONDS = 20.0  # for a stranger to prove that it knows the key
# What sending and receiving raise when a connection is lost.
LOST = (EOFError, OSError, ValueError)


def send(connection: Connection, head: Mapping[str, Any], body: Any = None) -> None:
    """One message: a small dict, and bytes if there are any."""
    connection.send_bytes(json.dumps({**head, "body": body is not None}).encode())
    if body is not None:
        connection.send_bytes(body)


def receive(connection: Connection) -> tuple[dict[str, Any], bytes]:
    """The next message; raises one of `LOST` if the other end is gone."""
    head = json.loads(connection.recv_bytes())
    return head, connection.recv_bytes() if head["body"] else b""


def to_bytes(content: Any) -> bytes:
    """Tensors, numbers and strings in dicts and lists, as bytes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def from_bytes(body: bytes) -> Any:
    """What `to_bytes` was given, on the CPU. No code runs on the way."""
    return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)


def hang_up(connection: Connection) -> None:
    """Close a connection, and wake the thread that reads from it."""
    with (
        contextlib.suppress(OSError),  # gone already
        socket.socket(fileno=os.dup(connection.fileno())) as twin,
    ):
        twin.shutdown(socket.SHUT_RDWR)


class Door:
    """Where a trainer listens. Each worker that knows the key is passed to `welcome`, in its thread."""

    def __init__(self, host: str, welcome: Callable[[Connection], None]) -> None:
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        self.key, self._welcome = secrets.token_bytes(32), welcome
        threading.Thread(target=self._listen, daemon=True, name="rholoss door").start()

    def _listen(self) -> None:
        while True:
            try:
                arrived, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(arrived,), daemon=True).start()

    def _greet(self, arrived: socket.socket) -> None:
        connection = _connection(arrived)
        alarm = threading.Timer(GREETING_SECONDS, hang_up, (connection,))
        alarm.daemon = True
        alarm.start()
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
        except Exception:  # whatever a stranger sends
            connection.close()
            return
        finally:
            alarm.cancel()
        self._welcome(connection)

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()


def connect(host: str, port: int, key: bytes) -> Connection:
    """The way in through a trainer's door."""
    connection = _connection(socket.create_connection((host, port), timeout=GREETING_SECONDS))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


def _connection(made: socket.socket) -> Connection:
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may vanish
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(made.detach())


def meeting_place(hosts: bool = False) -> Any:
    """The store of the launch. Where torchrun does not run one, `hosts` is true on the first trainer."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RholossError(
            f"{' and '.join(missing)} is not set, so that trainers and scoring workers cannot find "
            "each other; start the script with `torchrun --nproc-per-node N script.py`."
        )
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=hosts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        wait_for_workers=False,
        multi_tenant=True,
    )
    # Its entries outlive the ranks that torchrun restarts.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"rholoss workers, start {start}", store)  # type: ignore[attr-defined]


def own_host() -> tuple[str, str]:
    """The address to listen at, and the one to tell the workers."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing: asks which address leads there
        address = probe.getsockname()[0]
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1:
        return address, address
    # Names of machines often lead to themselves by a loopback address, which is no use to others.
    return "", master if ipaddress.ip_address(address).is_loopback else address


def announce(store: Any, trainer: int, host: str, door: Door) -> None:
    """Tell the workers of a trainer where it listens."""
    store.set(f"trainer {trainer}", json.dumps([host, door.port, door.key.hex()]))


def find(store: Any, trainer: int, go_on: Callable[[], bool]) -> Connection | None:
    """The connection of a worker to its trainer, once it listens; None if it is not to `go_on`."""
    while not store.check([f"trainer {trainer}"]):
        if not go_on():
            return None
        time.sleep(0.1)
    host, port, key = json.loads(store.get(f"trainer {trainer}"))
    return connect(host, port, bytes.fromhex(key))
