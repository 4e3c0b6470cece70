"""HTTP: requests in, text out. Handlers queue and read; the engine's thread computes."""
