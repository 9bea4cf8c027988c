"""BLAKE2b, the hash of block keys and digests: that of `hashlib`, which loads OpenSSL too."""

try:
    from _blake2 import blake2b
except ImportError:  # a Python whose module has another name
    from hashlib import blake2b

__all__ = ["blake2b"]
