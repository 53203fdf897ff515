"""A mock OpenAI server with known latencies, to test load generators. Start with `server`."""
