"""Jobs whose session was not started by dflash-ops: their client, and what is refused for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.client import JobClient
    from dflash_ops.hosts.base import Host
    from dflash_ops.hosts.factory import Hosts
    from dflash_ops.inventory import Inventory, Job


def client_of(host: Host, job: Job, python: str) -> JobClient:
    """The client that fits the job."""
    if job.adopted:
        from dflash_ops.adopted import AdoptedClient

        return AdoptedClient(host, job, python)
    from dflash_ops.client import JobClient

    return JobClient(host, job, python)


def client_at(loaded: Inventory, hosts: Hosts, part: Job) -> JobClient:
    """The client of a job, or of one of its nodes, by the way that the inventory says."""
    return client_of(hosts[part.host], part, loaded.host_of(part).python)


def refuse_adopted(job: Job, command: str, *, always: bool = False) -> None:
    """Refuse what would act on an adopted session.

    Args:
        always: whatever the policy says; there is nothing that it could mean.

    Raises:
        UsageError: the job is adopted, and observed only (or `always`).
    """
    if not job.adopted:
        return
    if always or command == "deploy":
        raise UsageError(
            f"job {job.name} is adopted: dflash-ops did not start it, so there is nothing to {command}",
            job.inventory,
            "stop it there, then replace `adopted` by a trainer or a command in the inventory, and deploy",
        )
    if job.policy.mode != "act":
        raise UsageError(
            f"job {job.name} is adopted and only observed: it is not touched",
            job.inventory,
            f'to {command} it from here: policy = {{ mode = "act" }} in its table',
        )
