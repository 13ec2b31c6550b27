"""cddp as an engine of torch.distributed, for CPU tensors.

    python3 examples/torch/cddp_torch.py                   builds it (1 minute); again after an update
    export PYTHONPATH=examples/torch

Then, in a program of PyTorch:

    import cddp_torch
    dist.init_process_group("cddp")                        # or "cpu:cddp,cuda:nccl"

Everything else stays as with gloo: DistributedDataParallel and its hooks, ZeroRedundancyOptimizer,
Join, sub-groups, async_op=True, torchrun, spawned workers. dist.monitored_barrier asks for gloo by
name; write cddp_torch.monitored_barrier. Needs PyTorch 2.5 or later, g++ and ninja (pip install ninja).
"""
import datetime
import importlib.machinery
import importlib.util
import os
import secrets
import shutil
import socket
import sys
import tempfile

import torch
import torch.distributed as dist

FOLDER = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(FOLDER, f"cddp_backend-{torch.__version__}.so")


def build():
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory() as folder:
        cpp_extension.load("cddp_backend", [os.path.join(FOLDER, "cddp_backend.cpp")], build_directory=folder,
                           extra_cflags=["-O2"], verbose=True)
        shutil.copy(os.path.join(folder, "cddp_backend.so"), LIBRARY + ".new")
    os.replace(LIBRARY + ".new", LIBRARY)  # programs that run keep the old one


def load():
    if not os.path.exists(LIBRARY):
        raise ImportError(f"{LIBRARY} does not exist: run `python3 {__file__}` once to build it")
    loader = importlib.machinery.ExtensionFileLoader("cddp_backend", LIBRARY)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("cddp_backend", loader))
    loader.exec_module(module)
    return module


def this_host():
    """Equal for ranks that can meet by an abstract Unix socket."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return " ".join([f.read().strip(), os.readlink("/proc/self/ns/net"), os.environ.get("CDDP_HOST_ID", "")])


def own_address():
    """This host's address on the route to MASTER_ADDR; if that is this host, MASTER_ADDR unchanged."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return socket.gethostname()
    family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(address)  # sends nothing
        own = s.getsockname()[0]
    return master if own == address[0] else own


def free_port():
    first, _, last = os.environ.get("CDDP_PORTS", "0-0").partition("-")
    for port in range(int(first), int(last) + 1):
        with socket.socket() as s:
            try:
                s.bind(("", port))
                return s.getsockname()[1]
            except OSError:
                pass
    raise RuntimeError("cddp: no port of CDDP_PORTS is free")


def create(store, rank, size, timeout):
    """Called by init_process_group and new_group on each rank of the group."""
    store.set(f"host {rank}", this_host())
    if rank == 0:
        one_host = len({store.get(f"host {r}") for r in range(size)}) == 1
        secret = secrets.token_hex(16)
        address = own_address()
        address = f"[{address}]" if ":" in address else address
        place = f"unix://cddp-torch-{secret}" if one_host else f"tcp://{address}:{free_port()}"
        store.set("place", f"{place} {secret}")
    place, secret = store.get("place").decode().split()
    return library.create(place, os.environ.get("CDDP_SECRET", secret), rank, size, timeout)


def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
    """torch.distributed.monitored_barrier, which refuses every engine except gloo."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    timeout = dist.distributed_c10d.default_pg_timeout if timeout is None else timeout
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


if __name__ == "__main__":
    build()
library = load()
if __name__ == "__main__":
    print(f"built {LIBRARY}\nNow: export PYTHONPATH={FOLDER}, import cddp_torch, dist.init_process_group(\"cddp\")")
else:
    dist.Backend.register_backend("cddp", create, devices=["cpu"])
