"""Floor 6: conversations. Chat templates, histories that are exact to the token, and the public engine."""
