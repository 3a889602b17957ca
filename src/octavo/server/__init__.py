"""Floor 7: the HTTP server. OpenAI's and Anthropic's interfaces over engines in this process."""
