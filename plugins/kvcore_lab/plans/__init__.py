"""Plans: the load that a server takes, and the servers that a load needs."""
