"""Servers: an OpenAI-style API that computes, and a proxy that routes."""
