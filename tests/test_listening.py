"""The tests' list of listening sockets: what it says is what is there."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from tests.listening import WILDCARDS, Watch, listeners


@pytest.mark.parametrize("family, address", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_a_socket_of_this_process_is_seen_under_its_address(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        port = listener.getsockname()[1]
        assert port not in {found.port for found in listeners()}, "bound and not listening"
        listener.listen()
        assert [found.address for found in listeners() if found.port == port] == [address]
    assert port not in {found.port for found in listeners()}


def test_a_child_that_listens_to_all_is_noticed() -> None:
    """Negative control of the tests that find none."""
    program = "import socket, sys; s = socket.socket(); s.bind(('', 0)); s.listen(); print('up', flush=True); sys.stdin.read()"
    with Watch(interval_s=0.05) as watch:
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        time.sleep(0.3)
        child.communicate()
    assert any(found.address in WILDCARDS and "s.bind" in found.command for found in watch.seen)
