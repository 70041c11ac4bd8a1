"""The arguments of a job on several machines: what is read, and how each fault is told."""

from __future__ import annotations

import argparse

import pytest

from trainer.errors import ConfigErrors, each_error
from trainer.node_args import NodeArgs, add_node_arguments, node_args


def read(*words: str) -> NodeArgs:
    parser = argparse.ArgumentParser()
    add_node_arguments(parser)
    return node_args(parser.parse_args(words))


def test_places_are_read() -> None:
    assert read() == NodeArgs()
    assert read("--nnodes", "1", "--node-rank", "0", "--rdzv-endpoint", "a:1") == NodeArgs()
    two = read("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "192.0.2.1:29400", "--rdzv-timeout", "7")
    assert two == NodeArgs(2, 1, "192.0.2.1", 29400, 7.0)
    assert two.endpoint == "192.0.2.1:29400"
    six = read("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "[2001:db8::1]:29400")
    assert (six.host, six.endpoint) == ("2001:db8::1", "[2001:db8::1]:29400")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--nnodes", "0"), ["--nnodes"]),
        (("--nnodes", "2"), ["--node-rank", "--rdzv-endpoint"]),
        (("--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"), ["--node-rank"]),
        (("--node-rank", "1"), ["--node-rank"]),
        (("--nnodes", "2", "--node-rank", "-1", "--rdzv-endpoint", "a"), ["--node-rank", "--rdzv-endpoint"]),
        *(
            (("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", bad), ["--rdzv-endpoint"])
            for bad in ("host", "host:", ":29400", "host:0", "host:65536", "host:x", "2001:db8::1:29400", "a b:1", "")
        ),
        (("--rdzv-timeout", "0"), ["--rdzv-timeout"]),
        (("--rdzv-timeout", "nan"), ["--rdzv-timeout"]),
    ],
)
def test_faults_are_told_all_at_once(words: tuple[str, ...], where: list[str]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read(*words)
    assert [e.where for e in each_error(caught.value)] == where
    assert all(e.next for e in each_error(caught.value))
