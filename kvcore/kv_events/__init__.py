"""KV-cache events of real servers: received, decoded, recorded, tracked; made from traces."""

from kvcore.kv_events.block_tracker import (
    Anomaly,
    BlockLocation,
    BlockTracker,
    RecordingReport,
    check_recording,
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
from kvcore.lazy import former

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
    "Gap",
    "InvalidMessage",
    "Lost",
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
    "check_recording",
    "decode",
    "encode",
    "is_recording",
    "record",
    "unparsed_reasons",
]

__getattr__ = former(__name__)
