"""KV events of real servers: read, followed, recorded and published."""
