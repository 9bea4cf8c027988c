"""The data in the bytes of a page, read without a browser."""

import gzip
import json
import re
from base64 import b64decode


def data_of(page, name):
    """Return the value of a JSON data block of a page's bytes."""
    (packed,) = re.findall(rf'id="data-{name}">([^<]*)<'.encode(), page)
    return json.loads(gzip.decompress(b64decode(packed)))
