"""Real traffic: a server behind an OpenAI-style API, and a proxy in front of several."""
