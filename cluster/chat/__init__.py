"""How families write reasoning and tool calls: the text of an output as events, the same for every API."""
