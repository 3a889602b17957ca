"""What the interfaces share: messages, prompts whose history is exact to the token, and answers in pieces."""
