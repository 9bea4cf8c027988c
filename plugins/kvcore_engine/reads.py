"""How much of the K/V attention reads for generated tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcore.cache.sequence import Sequence as HeldSequence
from kvcore.engine.backend import TensorLayout
from kvcore.engine.batch import RaggedBatch
from kvcore.models.codec import PLANE_BYTES, Part
from kvcore_engine.page_reader import PageReader


class AttentionReads:
    """K/V that attention of generated tokens has read, over all sequences of a run.

    Counted by lengths: what a token reads follows from its position, the windows of layers,
    and the budget of a policy that selects pages.

    Args:
        layout: the layout of the K/V.
        windows: attention window of each layer.
        reader: reads selected pages; None: all tokens that are held and in reach are read.

    Attributes:
        tokens: number of generated tokens that attended.
        layer_tokens: K/V that they read, in tokens of a layer.
        text_layer_tokens: the same if each had read the whole text up to it, in all layers.
    """

    def __init__(
        self, layout: TensorLayout, windows: Sequence[int | None], reader: PageReader | None
    ) -> None:
        self._reader = reader
        self._block_size = layout.block_size
        self._token_bytes = layout.bytes_per_block / (layout.layers * layout.block_size)
        self._waiting_bytes = waiting_bytes(layout)
        # Number of layers by their window, and by whether tokens select pages there.
        self._kinds = Counter(
            (window, reader is not None and not reader.reads_all(layer, window))
            for layer, window in enumerate(windows)
        )
        self._waiting_layer_tokens = 0
        self.tokens = self.layer_tokens = self.text_layer_tokens = 0

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summaries of pages that were read to select among them."""
        return 0 if self._reader is None else self._reader.summary_bytes

    @property
    def bytes(self) -> float:
        """Bytes that were read: of blocks, of tokens that wait to be coded, and summaries."""
        waiting = self._waiting_layer_tokens * self._waiting_bytes
        return self.layer_tokens * self._token_bytes + waiting + self.summary_bytes

    @property
    def text_bytes(self) -> float:
        """Bytes of the whole text up to each token, in the same codec."""
        return self.text_layer_tokens * self._token_bytes

    def add(self, sequences: Iterable[HeldSequence], batch: RaggedBatch) -> None:
        """Add what the generated tokens of a step read."""
        for seq, context, length in zip(sequences, batch.contexts, batch.lengths, strict=True):
            lost, end = seq.dropped_tokens, context + length
            for before in range(max(context, seq.request.prompt_tokens - lost), end):
                self.tokens += 1
                waiting = (before + 1) % self._block_size
                for (window, selects), layers in self._kinds.items():
                    tokens = before + 1
                    if selects and self._reader is not None:
                        tokens = self._reader.tokens_read(seq, before)
                    elif window is not None and not lost:
                        # After a loss a window masks tokens, which are gathered all the same.
                        tokens = min(tokens, window)
                    self.layer_tokens += tokens * layers
                    self._waiting_layer_tokens += waiting * layers
                    self.text_layer_tokens += (before + lost + 1) * layers


def waiting_bytes(layout: TensorLayout) -> int:
    """Return the bytes of a token in a layer that waits until its block is full to be coded.

    Its place in the block counts besides; 0 for codecs that code each token by itself.
    """
    codec = layout.codec
    if codec is None:
        return 0
    parts: tuple[tuple[Part, int], ...] = (
        ("keys", layout.head_dim),
        ("values", layout.value_dim),
    )
    width = sum(width for part, width in parts if not codec.by_token(part))
    return width * layout.kv_heads * PLANE_BYTES[layout.dtype]
