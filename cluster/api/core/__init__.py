"""What every API shares: requests, prompts, chat templates, tools, grammars, streams, errors and usage."""
