"""A server of an engine, with the endpoints of OpenAI's API (extra `serve`)."""

from spsjax.utils import extras

extras.require("serve", "starlette", "uvicorn", "pydantic", "prometheus_client")
