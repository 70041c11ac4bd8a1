"""Which node of how many a launcher is: `--nnodes`, `--node-rank`, `--rdzv-endpoint`, `--rdzv-timeout`. No torch.

The same names as torchrun has, with the same meaning, so that whoever starts jobs there need not learn others.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from trainer.errors import ConfigError, ConfigErrors

DEFAULT_TIMEOUT_S = 600.0
#: Every node reads every other one's short report about twice a second.
MOST_NODES = 256


@dataclass(frozen=True)
class NodeArgs:
    """This launcher's place.

    Attributes:
        count: N, machines of the job. rank: R, 0 to N-1; 0 hosts the endpoint.
        host, port: of the endpoint, as every node reaches it; "" and 0 for a job on one machine.
        timeout_s: seconds that all nodes have to meet at the start.
    """

    count: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines", "the same command on each of them, but for --node-rank")
    group.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines of the job (1)")
    group.add_argument("--node-rank", type=int, default=None, metavar="R", help="which one this is, from 0")
    group.add_argument(
        "--rdzv-endpoint", default=None, metavar="HOST:PORT", help="where node 0 listens, as all nodes reach it"
    )
    group.add_argument(
        "--rdzv-timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"seconds that all nodes have to meet at the start ({DEFAULT_TIMEOUT_S:g})",
    )


def node_args(arguments: argparse.Namespace) -> NodeArgs:
    """
    Raises:
        ConfigErrors: with every fault of the four arguments.
    """
    count, rank, endpoint = arguments.nnodes, arguments.node_rank, arguments.rdzv_endpoint
    timeout = arguments.rdzv_timeout
    errors: list[ConfigError] = []
    if not 1 <= count <= MOST_NODES:
        errors.append(ConfigError(f"there cannot be {count} nodes", "--nnodes", f"1 to {MOST_NODES}"))
    elif rank is None and count > 1:
        errors.append(ConfigError("which node is this?", "--node-rank", f"give each node its own, 0 to {count - 1}"))
    elif rank is not None and not 0 <= rank < count:
        errors.append(ConfigError(f"there is no node {rank} of {count}", "--node-rank", f"0 to {count - 1}"))
    host, port = "", 0
    if endpoint is not None:
        host, port = _split(endpoint, errors)
    elif count > 1:
        errors.append(
            ConfigError("where do the nodes meet?", "--rdzv-endpoint", "HOST:PORT of node 0, as all nodes reach it")
        )
    if not (math.isfinite(timeout) and timeout > 0):
        errors.append(ConfigError(f"{timeout} is no time", "--rdzv-timeout", "seconds, above 0"))
    if errors:
        raise ConfigErrors(errors)
    return NodeArgs(count, rank or 0, host, port, timeout) if count > 1 else NodeArgs()


def _split(endpoint: str, errors: list[ConfigError]) -> tuple[str, int]:
    """HOST:PORT, or [IPV6]:PORT."""
    host, colon, number = endpoint.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    port = int(number) if number.isascii() and number.isdigit() else 0
    fits = colon and inner and (":" not in inner or bracketed) and not any(c.isspace() for c in inner)
    if not fits or not 0 < port < 65536:
        errors.append(
            ConfigError(f"{endpoint!r} is no endpoint", "--rdzv-endpoint", "HOST:PORT, or [ADDRESS]:PORT for IPv6")
        )
        return "", 0
    return inner, port
