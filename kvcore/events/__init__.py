"""KV events of real servers: read, written, followed, recorded, and made from traces."""

from kvcore.events.checking import RecordingReport, check_recording
from kvcore.events.codecs import FORMATS, decode, encode
from kvcore.events.export import (
    MooncakeRows,
    block_hash,
    dynamo_batches,
    event_batches,
    write_lines,
)
from kvcore.events.ledger import Anomaly, Ledger, Place
from kvcore.events.model import (
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
from kvcore.events.ordering import Delivery, Gap, Garbage, Restart
from kvcore.events.publisher import Publisher
from kvcore.events.reading import (
    Lost,
    Received,
    RecordingReader,
    Restarted,
    Skipped,
    is_recording,
)
from kvcore.events.recorder import Tally, record
from kvcore.events.recording import RecordingWriter, unread
from kvcore.events.transport import Server, Subscriber

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
