"""Where the ranks of a job of this suite are."""

import os


def gpu_of(rank, ranks):
    """A GPU of its own, or one for all: NCCL refuses two ranks of one machine on one GPU, so these
    say that they are on different machines, and talk over sockets. To be called before NCCL is."""
    import torch

    if torch.cuda.device_count() >= ranks:
        return rank
    os.environ["NCCL_HOSTID"] = f"machine-of-rank-{rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return 0
