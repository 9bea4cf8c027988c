"""Online serving: servers of an OpenAI-style API, and the proxy that routes to them."""
