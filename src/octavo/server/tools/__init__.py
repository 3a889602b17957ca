"""Calls of tools: how models write them, grammars that hold a model to it, and reading them from an answer."""
