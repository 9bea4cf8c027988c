"""Checkpoint policies: where windows and states of cache groups are kept.

intervals.py    chunk, every: wherever a chunk ends, or at multiples
marconi.py      marconi, seglen: what a segment saves decides what leaves
sparse.py       sparse: positions by a dynamic program from the overlaps of requests
"""

from kvcore_plugins.checkpoint.intervals import Chunk, Every
from kvcore_plugins.checkpoint.marconi import Marconi, SegLen
from kvcore_plugins.checkpoint.sparse import Sparse, place

__all__ = ["Chunk", "Every", "Marconi", "SegLen", "Sparse", "place"]
