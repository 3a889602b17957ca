"""The dashboard and the chat page: what the engines hold and do, live, for whoever holds the key."""
