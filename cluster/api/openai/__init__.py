"""OpenAI's protocol: bodies, fields and answers of the REST routes, and what they cost. Ray is not imported here."""
