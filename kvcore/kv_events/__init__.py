"""KV-cache events of real servers: received, decoded, recorded, tracked; made from traces."""

from kvcore.kv_events.block_tracker import (
    Anomaly,
    BlockLocation,
    BlockTracker,
    RecordingReport,
    check_recording,
)
from kvcore.kv_events.export import (
    ExportSize,
    MooncakeRows,
    block_hash,
    dynamo_batches,
    event_batches,
    write_lines,
)
from kvcore.kv_events.formats import FORMATS, decode, encode
from kvcore.kv_events.model import (
    AllBlocksCleared,
    Block,
    BlockRemoved,
    BlockStored,
    BlockUpdated,
    EventBatch,
    Page,
    PagesStored,
    PoolCreated,
    UnparsedEvent,
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
    unparsed_reasons,
)
from kvcore.kv_events.sequencer import Delivery, Gap, InvalidMessage, Restart
from kvcore.kv_events.subscriber import Server, Subscriber

__all__ = [
    "FORMATS",
    "AllBlocksCleared",
    "Anomaly",
    "Block",
    "BlockLocation",
    "BlockRemoved",
    "BlockStored",
    "BlockTracker",
    "BlockUpdated",
    "Delivery",
    "EventBatch",
    "ExportSize",
    "Gap",
    "InvalidMessage",
    "Lost",
    "MooncakeRows",
    "Page",
    "PagesStored",
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
    "UnparsedEvent",
    "block_hash",
    "check_recording",
    "decode",
    "dynamo_batches",
    "encode",
    "event_batches",
    "is_recording",
    "record",
    "unparsed_reasons",
    "write_lines",
]
