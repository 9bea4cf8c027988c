"""Clusters: several servers under one clock, and the routers that divide requests."""
