"""What every process needs and no package owns: queues between processes and the private directory of their sockets.

Imports no torch, so that API and tokenizer processes start quickly. Must know no message, model or device.
"""

from minisgl.utils.run_dir import ipc_address, make_private_directory, run_directory
from minisgl.utils.zmq_queue import (
    ZmqAsyncPullQueue,
    ZmqPubQueue,
    ZmqPullQueue,
    ZmqPushQueue,
    ZmqSubQueue,
    decode_or_drop,
    wait_any,
)

__all__ = [
    "ZmqAsyncPullQueue",
    "ZmqPubQueue",
    "ZmqPullQueue",
    "ZmqPushQueue",
    "ZmqSubQueue",
    "decode_or_drop",
    "ipc_address",
    "make_private_directory",
    "run_directory",
    "wait_any",
]
