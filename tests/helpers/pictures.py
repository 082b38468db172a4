"""Pictures as files, compared without the command line that they carry."""

import struct

SIGNATURE = 8  # bytes of a PNG before its first chunk


def without_command(data: bytes) -> bytes:
    """A PNG's bytes without the chunk that says which command made it; any other file's as they are."""
    if not data.startswith(b"\x89PNG"):
        return data
    kept, at = data[:SIGNATURE], SIGNATURE
    while at < len(data):
        size = 12 + struct.unpack(">I", data[at : at + 4])[0]
        chunk = data[at : at + size]
        kept += b"" if chunk[4:].startswith(b"iTXtCommand\0") else chunk
        at += size
    return kept
