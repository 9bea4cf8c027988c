"""The verbs of servers and proxies."""
