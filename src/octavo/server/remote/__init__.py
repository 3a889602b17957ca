"""An engine in a process of its own, and how the server's process speaks with it."""
