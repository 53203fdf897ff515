"""Why node 0 is not found, and which interfaces lead to it; what needs several networks is in end_to_end."""

from __future__ import annotations

import errno
import socket

import pytest

from paceline.errors import LaunchError
from paceline.launchers.node import rendezvous

INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "fe80::1"], "ib0": ["10.1.0.1"], "eth1": []}


def test_a_name_that_does_not_resolve() -> None:
    connection, problem = rendezvous.connect("node0.invalid", 1)
    assert connection is None
    assert problem is not None
    assert problem.startswith("the name of node 0, 'node0.invalid', does not resolve here")
    assert problem.endswith("; try: getent hosts node0.invalid")


def test_an_open_port_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection, problem = rendezvous.connect("127.0.0.1", server.getsockname()[1])
        assert problem is None
        assert connection is not None
        connection.close()


def test_an_address_of_this_very_host_is_called_that(golden: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    _, problem = rendezvous.connect("127.0.0.1", port)
    assert str(problem) == golden
    assert f"{port}" in str(problem)
    assert "127.0.0.1" in str(problem)


@pytest.mark.parametrize(
    ("address", "interfaces", "given", "only"),
    [
        ("fd00::7", {"lo": ["::1"], "eth0": ["10.0.0.1", "fe80::1"]}, "IPv6 address fd00::7", "only IPv4"),
        ("10.0.0.7", {"lo": ["127.0.0.1"], "eth0": ["fd00::1"]}, "IPv4 address 10.0.0.7", "only IPv6"),
    ],
)
def test_hosts_of_one_family_do_not_reach_the_other(
    address: str, interfaces: dict[str, list[str]], given: str, only: str
) -> None:
    sentence = str(rendezvous._family_mismatch(address, lambda: interfaces))
    assert given in sentence
    assert only in sentence


def test_a_family_that_both_speak_is_not_to_blame() -> None:
    assert rendezvous._family_mismatch("10.0.0.7", lambda: INTERFACES) is None
    error = OSError(errno.ENETUNREACH, "Network is unreachable")
    assert "try: ip route get 198.51.100.7" in rendezvous._refusal("node0", "198.51.100.7", 1, error)


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.1.0.1", "ib0"),
        ("::ffff:10.0.0.1", "eth0"),
        ("127.0.0.2", "lo"),
        ("10.9.9.9", None),
        ("fe80::1%eth0", "eth0"),
    ],
)
def test_the_interface_of_an_address(address: str, interface: str | None) -> None:
    assert rendezvous.interface_of(address, lambda: INTERFACES) == interface


@pytest.mark.parametrize("given", ["eth0", "eth0,ib0", "eth", "=eth0", "^docker", "^=lo", "eth7,ib0"])
def test_interfaces_that_are_there(given: str) -> None:
    rendezvous.check_interfaces({"NCCL_SOCKET_IFNAME": given}, ("NCCL_SOCKET_IFNAME",), INTERFACES)


@pytest.mark.parametrize("given", ["eth7", "=eth", "eth1", "docker0", "^lo,eth,ib"])
def test_interfaces_that_are_not_there_or_have_no_address(given: str, golden: object) -> None:
    with pytest.raises(LaunchError) as caught:
        rendezvous.check_interfaces({"NCCL_SOCKET_IFNAME": given}, ("NCCL_SOCKET_IFNAME",), INTERFACES)
    assert str(caught.value) == golden
    assert "eth0" in str(caught.value)
    assert "ib0" in str(caught.value)


def test_beginnings_of_names_mean_nothing_to_gloo(golden: object) -> None:
    with pytest.raises(LaunchError) as caught:
        rendezvous.check_interfaces({"GLOO_SOCKET_IFNAME": "eth"}, ("GLOO_SOCKET_IFNAME",), INTERFACES)
    assert str(caught.value) == golden
    assert "GLOO_SOCKET_IFNAME" in str(caught.value)
    assert "eth" in str(caught.value)


def test_this_host_has_loopback() -> None:
    assert "127.0.0.1" in rendezvous.all_interfaces()["lo"]
