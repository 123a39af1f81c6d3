"""OpenAI's protocol: bodies, fields and answers of the REST routes, and what they cost. Not known here: Serve, Ray."""
