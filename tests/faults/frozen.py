"""Mounts a file system at MOUNT whose server never answers, and says `ready`: `frozen.py MOUNT`.

Whoever looks into it waits in the kernel, where not even SIGKILL reaches, until this process ends.
"""

import ctypes
import os
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
mount = sys.argv[1].encode()
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"frozen", mount, b"fuse", 0, options) != 0:
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
print("mounted", flush=True)
request = os.read(device, 1 << 17)
_, opcode, unique = struct.unpack_from("<IIQ", request)
assert opcode == 26, opcode  # FUSE_INIT
answer = struct.pack("<IIIIHHIIHHI7I", 7, 31, 65536, 0, 12, 9, 4096, 1, 1, 0, 0, *[0] * 7)
os.write(device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
print("ready", flush=True)
while True:
    os.read(device, 1 << 17)  # taken, and never answered
