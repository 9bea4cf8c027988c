"""KV events of real servers: read, written, followed, recorded, and made from traces."""

from kvcore.kv_events.block_tracker import Anomaly, Ledger, Place
from kvcore.kv_events.checking import RecordingReport, check_recording
from kvcore.kv_events.codecs import FORMATS, decode, encode
from kvcore.kv_events.export import (
    MooncakeRows,
    block_hash,
    dynamo_batches,
    event_batches,
    write_lines,
)
from kvcore.kv_events.model import (
    AllBlocksCleared,
    Batch,
    Block,
    BlockRemoved,
    BlockStored,
    BlockUpdated,
    Page,
    PagesStored,
    PoolCreated,
    Unread,
    Wire,
)
from kvcore.kv_events.publisher import Publisher
from kvcore.kv_events.recording import (
    Lost,
    Received,
    RecordingReader,
    RecordingWriter,
    Restarted,
    Skipped,
    Tally,
    is_recording,
    record,
    unread,
)
from kvcore.kv_events.subscriber import Delivery, Gap, Garbage, Restart, Server, Subscriber

__all__ = [
    "FORMATS",
    "AllBlocksCleared",
    "Anomaly",
    "Batch",
    "Block",
    "BlockRemoved",
    "BlockStored",
    "BlockUpdated",
    "Delivery",
    "Gap",
    "Garbage",
    "Ledger",
    "Lost",
    "MooncakeRows",
    "Page",
    "PagesStored",
    "Place",
    "PoolCreated",
    "Publisher",
    "Received",
    "RecordingReader",
    "RecordingReport",
    "RecordingWriter",
    "Restart",
    "Restarted",
    "Server",
    "Skipped",
    "Subscriber",
    "Tally",
    "Unread",
    "Wire",
    "block_hash",
    "check_recording",
    "decode",
    "dynamo_batches",
    "encode",
    "event_batches",
    "is_recording",
    "record",
    "unread",
    "write_lines",
]
