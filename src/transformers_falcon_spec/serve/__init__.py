"""A server of a target with its drafter, with the endpoints of OpenAI: the queue, texts as they grow, the protocol."""
