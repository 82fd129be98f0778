"""Event files, which TensorBoard reads.

tensorboardX has the messages. Its writer, though, is a thread of its own that meets a full disk
alone: here each record is on the disk, or the caller has the error.
"""

import pathlib
import socket
import struct
import time

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar


class Writer:
    """Appends curves to a new event file; of others in the folder, what is from `step` on goes."""

    def __init__(self, folder: pathlib.Path, step: int):
        now = time.time()
        self._path = folder / f"events.out.tfevents.{int(now)}.{socket.gethostname()}"
        start = SessionLog(status=SessionLog.START)
        self._append(
            Event(wall_time=now, file_version="brain.Event:2"),
            Event(wall_time=now, step=step, session_log=start),
        )

    def add(self, step: int, **values: float) -> None:
        """A point of each curve."""
        now = time.time()
        self._append(
            *(
                Event(wall_time=now, step=step, summary=scalar(name, value))
                for name, value in values.items()
            )
        )

    def _append(self, *events: Event) -> None:
        with open(self._path, "ab") as file:
            for event in events:
                content = event.SerializeToString()
                size = struct.pack("<Q", len(content))
                file.write(size + _checksum(size) + content + _checksum(content))


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))
