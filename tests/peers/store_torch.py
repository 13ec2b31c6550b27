#!/usr/bin/env python3
"""The store against PyTorch's TCPStore: its clients on our server, our client on its server, and a
whole process group on our server. For PyTorch 2.2 and later, with torch.distributed; exit code 77
without.

Run: python3 tests/peers/store_torch.py"""
import ctypes
import datetime
import os
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
except ImportError:
    print("SKIP: PyTorch is not installed")
    sys.exit(77)
if not dist.is_available():
    print("SKIP: this PyTorch has no torch.distributed")
    sys.exit(77)

if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 2):
    print("SKIP: this is for PyTorch 2.2 and later, here is", torch.__version__)
    sys.exit(77)

HERE = os.path.dirname(os.path.abspath(__file__))
checks = 0


def check(ok, what):
    global checks
    checks += 1
    if not ok:
        print("FAIL store_torch:", what)
        sys.exit(1)


class Desc(ctypes.Structure):
    _fields_ = [("init_method", ctypes.c_char_p), ("is_server", ctypes.c_bool),
                ("timeout_s", ctypes.c_double), ("secret", ctypes.c_char_p),
                ("allocator", ctypes.c_void_p * 3)]


def build(folder):
    source, library = os.path.join(folder, "cddp.c"), os.path.join(folder, "libcddp.so")
    with open(source, "w") as f:
        f.write('#define CDDP_IMPLEMENTATION\n#include "%s"\n' % os.path.join(HERE, "..", "..", "cddp.h"))
    cc = os.environ.get("CC", "cc").split()
    flags = ["-O1", "-shared", "-fPIC", source, "-o", library, "-lpthread", "-lm"]
    subprocess.check_call(cc + flags)
    lib = ctypes.CDLL(library)
    lib.cddp_error.restype = ctypes.c_char_p
    return lib


class Store:
    """cddp's store."""

    def __init__(self, lib, url, server):
        self.lib, self.p = lib, ctypes.c_void_p()
        desc = Desc(url.encode(), server, 20.0, b"", (None,) * 3)
        self.ok(lib.cddp_store_create(ctypes.byref(self.p), ctypes.byref(desc)))
        self.port = lib.cddp_store_port(self.p)

    def ok(self, result):
        check(result == 0, self.lib.cddp_error().decode())

    def set(self, key, value):
        self.ok(self.lib.cddp_store_set(self.p, key.encode(), value, ctypes.c_size_t(len(value))))

    def get(self, key):
        buffer, size = ctypes.create_string_buffer(1 << 20), ctypes.c_size_t()
        self.ok(self.lib.cddp_store_get(self.p, key.encode(), buffer, ctypes.c_size_t(1 << 20),
                                        ctypes.byref(size)))
        return buffer.raw[:size.value]

    def add(self, key, amount):
        total = ctypes.c_int64()
        self.ok(self.lib.cddp_store_add(self.p, key.encode(), ctypes.c_int64(amount),
                                        ctypes.byref(total)))
        return total.value

    def swap(self, key, expected, desired):
        buffer = ctypes.create_string_buffer(4096)
        size, swapped = ctypes.c_size_t(), ctypes.c_bool()
        self.ok(self.lib.cddp_store_compare_set(
            self.p, key.encode(), expected, ctypes.c_size_t(len(expected)),
            desired, ctypes.c_size_t(len(desired)), buffer, ctypes.c_size_t(4096),
            ctypes.byref(size), ctypes.byref(swapped)))
        return buffer.raw[:size.value], swapped.value

    def keys(self):
        count = ctypes.c_int64()
        self.ok(self.lib.cddp_store_num_keys(self.p, ctypes.byref(count)))
        return count.value

    def close(self):
        self.lib.cddp_store_destroy(self.p)


def both_ways(ours, theirs):
    ours.set("from-c", b"a\0b")
    check(theirs.get("from-c") == b"a\0b", "torch reads what cddp wrote")
    theirs.set("from-torch", "x" * 100000)
    check(ours.get("from-torch") == b"x" * 100000, "cddp reads what torch wrote")
    totals = [theirs.add("n", 5), ours.add("n", 6), theirs.add("n", -1)]
    check(totals == [5, 11, 10], "one counter")
    check(theirs.get("n") == b"10", "counters are decimal text")
    check(ours.swap("c", b"", b"one") == (b"one", True), "compare_set of an absent key")
    if hasattr(theirs, "compare_set"):
        check(theirs.compare_set("c", "two", "three") == b"one", "torch sees cddp's value")
        check(theirs.compare_set("c", "one", "two") == b"two", "torch's compare_set swaps")
        check(ours.swap("c", b"one", b"four") == (b"two", False), "cddp sees torch's value")
    theirs.wait(["from-c", "n"], datetime.timedelta(seconds=5))
    try:
        theirs.wait(["absent"], datetime.timedelta(milliseconds=200))
        check(False, "a wait for an absent key ends")
    except Exception:
        check(True, "")
    check(theirs.num_keys() == ours.keys(), "the same number of keys")


def on_our_server(lib):
    server = Store(lib, "tcp://localhost:0", True)
    theirs = dist.TCPStore("localhost", server.port, is_master=False,
                           timeout=datetime.timedelta(seconds=20))
    both_ways(server, theirs)
    check(theirs.delete_key("n") and not theirs.delete_key("n"), "delete_key")
    theirs.append("ap", "z")
    theirs.multi_set(["m1", "m2"], ["1", "2"])
    check(theirs.multi_get(["m1", "m2", "ap"]) == [b"1", b"2", b"z"], "multi_get")
    theirs = None
    server.close()


RANK = """
import datetime, sys, time, torch
import torch.distributed as dist
rank, size, port = (int(a) for a in sys.argv[1:4])
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
dist.init_process_group("gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=size,
                        timeout=datetime.timedelta(seconds=60))
x = torch.full((1000,), float(rank + 1))
dist.all_reduce(x)
dist.barrier()
group = dist.new_group([0, 1])
lists = [None] * size
dist.all_gather_object(lists, "rank %d" % rank)
assert x.eq(size * (size + 1) / 2).all() and lists == ["rank %d" % r for r in range(size)]
del x, lists
time.sleep(0.5)  # PyTorch 2.6 hangs when a thread of gloo has yet to free a tensor
dist.destroy_process_group()
"""


def group_on_our_server(lib):
    server = Store(lib, "tcp://127.0.0.1:0", True)
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(r), "3", str(server.port)])
             for r in range(3)]
    check([p.wait(120) for p in ranks] == [0, 0, 0], "a gloo process group on our server")
    server.close()


def on_their_server(lib):
    for kind in [{"use_libuv": False}, {"use_libuv": True}]:
        try:
            theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                   timeout=datetime.timedelta(seconds=20), **kind)
        except (RuntimeError, TypeError) as e:
            check("libuv" in str(e) or "use_libuv" in str(e), str(e))  # built without it
            continue
        ours = Store(lib, "tcp://127.0.0.1:%d" % theirs.port, False)
        both_ways(ours, theirs)
        name = (ctypes.c_char_p * 1)(b"absent")
        check(lib.cddp_store_wait(ours.p, name, 1, ctypes.c_double(0.2)) == 5, "CDDP_TIMEOUT")
        check(b"absent" in lib.cddp_error(), "the text names the key")
        theirs.set("absent", "now")
        check(ours.get("absent") == b"now", "a wait that timed out leaves no trace")
        ours.close()
        theirs = None


with tempfile.TemporaryDirectory() as folder:
    library = build(folder)
    on_our_server(library)
    group_on_our_server(library)
    on_their_server(library)
print("ok store_torch (%d checks, PyTorch %s)" % (checks, torch.__version__))
