"""The captured step: reading and keeping trees in buffers of fixed shape, without a question to the host."""
