"""A server of an engine, with the endpoints of OpenAI's API (extra `serve`)."""
